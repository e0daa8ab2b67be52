"""What the plan of an observed job says, beside what scheduler and log tell of it.

Nothing here calibrates: whose job it is, and with which options it was started, is not known.
"""

from typing import NamedTuple

from pydantic import ValidationError

from planner.specs.estimate import PlanAnswer
from runners.shared.observed import ObservedJobReport
from webapp.charts.plots import SIDE_WORDS, Prediction
from webapp.core.display import Quantity, quantity
from webapp.jobs.models import ObservedJob
from webapp.jobs.observed_jobs import report_of
from webapp.plans.verdict import figure_values

# Figures of a log, in the order of the page: the word, the unit.
FIGURES = {
    "step": ("Step", ""),
    "total_steps": ("Steps in all", ""),
    "loss": ("Loss", ""),
    "step_seconds": ("Time of a step", "seconds"),
    "tokens_per_second": ("Tokens a second, all devices", "tokens_per_second"),
    "device_tokens_per_second": ("Tokens a second of a device", "tokens_per_second"),
    "device_flops_per_second": ("FLOP/s of a device", "flops_per_second"),
    "wall_seconds": ("Whole run", "seconds"),
    "devices": ("Devices", ""),
}
COMPARED = ("devices", "step_seconds", "tokens_per_second", "wall_seconds")


class Row(NamedTuple):
    """One figure of both; ``predicted`` None: the plan does not say it."""

    name: str
    measured: float
    predicted: Prediction | None

    @property
    def label(self) -> str:
        """Return the figure in words."""
        return FIGURES[self.name][0]

    @property
    def shown(self) -> Quantity:
        """Return what was measured with its unit."""
        return quantity(self.measured, FIGURES[self.name][1])

    @property
    def planned(self) -> Quantity | None:
        """Return what the plan says with its unit."""
        return quantity(self.predicted.value, FIGURES[self.name][1]) if self.predicted else None

    @property
    def interval(self) -> str:
        """Return the 80 % interval as words, "" without one."""
        said, unit = self.predicted, FIGURES[self.name][1]
        if said is None or said.low is None or said.high is None:
            return ""
        return f"{quantity(said.low, unit)} to {quantity(said.high, unit)}"

    @property
    def ratio(self) -> float | None:
        """Return measured ÷ predicted."""
        return self.measured / self.predicted.value if self.predicted else None

    @property
    def side(self) -> str:
        """Return in words how the measured value lies to the interval."""
        said = self.predicted
        return SIDE_WORDS[said.side_of(self.measured)].removeprefix(", ") if said else ""


def measured_figures(report: ObservedJobReport) -> dict[str, float]:
    """Return what was read of a job, by the names of ``FIGURES``.

    The time of a run is its own only when it ended well: until then it says how long it has run.
    """
    found = {name: value for name, value in report.figures.items() if name in FIGURES}
    facts = report.facts
    if facts is None:
        return found
    if facts.devices:
        found["devices"] = float(facts.devices)
        if "device_tokens_per_second" in found:
            found["tokens_per_second"] = found["device_tokens_per_second"] * facts.devices
    if report.has_ended and report.exit_code == 0 and facts.elapsed_seconds:
        found["wall_seconds"] = float(facts.elapsed_seconds)
    return found


def rows_of(job: ObservedJob) -> tuple[Row, ...]:
    """Return the figures of a job, each beside what the best strategy of its plan says."""
    measured = measured_figures(report_of(job))
    predicted = _predicted(job)
    return tuple(
        Row(name, measured[name], predicted.get(name)) for name in FIGURES if name in measured
    )


def _predicted(job: ObservedJob) -> dict[str, Prediction]:
    plan = job.plan
    if plan is None or plan.deleted_at is not None:
        return {}
    try:
        answer = PlanAnswer.model_validate(plan.answer)
    except ValidationError:  # stored by another release
        return {}
    if not answer.plans:
        return {}
    best = answer.plans[0]
    told = {name: figure_values(best, name) for name in COMPARED if name != "devices"}
    found = {name: Prediction(*values) for name, values in told.items() if values and values[0]}
    return found | {"devices": Prediction(float(best.cluster.num_devices), None, None)}
