"""The latency targets of a job's plan, evaluated by percentile: met or missed."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

from webapp.core.display import quantity
from webapp.core.figures import definition_of
from webapp.jobs.benchmark_reports import main_row_of
from webapp.jobs.measured_figures import JobFigure, JobFigures
from webapp.jobs.models import Job

PERCENT = 95  # of requests meet the target
NORMAL_80 = NormalDist().inv_cdf(0.9)  # half of an 80 % interval, in standard deviations
LEAST_CHANCE = 0.01  # smaller chances, and those above one minus this, are shown as bounds
WORDS = {
    "ttft": "First token within {}",
    "tpot": "Each further token within {}",
}
KINDS = ("serve", "benchmark")
State = Literal["met", "missed", "unjudged"]


@dataclass(frozen=True)
class Target:
    """One target of a job; ``limit`` and ``interval`` are in seconds.

    ``chance`` is the probability that the percentile is within the limit, for a normal
    distribution with its 80 % interval. None if there is no interval.
    """

    name: str
    limit: float
    figure: JobFigure | None
    interval: tuple[float, float] | None
    state: State
    words: str

    @property
    def title(self) -> str:
        """Return the target as text."""
        return WORDS[self.name].format(quantity(self.limit, "seconds"))

    @property
    def chance(self) -> float | None:
        """Return the probability that the percentile is within the limit."""
        value = self.figure.measured if self.figure else None
        if value is None or self.interval is None:
            return None
        low, high = self.interval
        deviation = (high - low) / 2 / NORMAL_80
        if deviation <= 0:
            return float(value <= self.limit)
        return NormalDist(value, deviation).cdf(self.limit)

    @property
    def chance_words(self) -> str:
        """Return the chance, rounded to its precision."""
        chance = self.chance
        if chance is None:
            return ""
        if chance < LEAST_CHANCE:
            return "chance below 1 %, from its 80 % interval"
        if chance > 1 - LEAST_CHANCE:
            return "chance above 99 %, from its 80 % interval"
        return f"chance {round(100 * chance)} %, from its 80 % interval"


def targets_of(job: Job, figures: JobFigures) -> list[Target]:
    """Return the targets of a serving job, each with its state."""
    workload = (job.plan_request or {}).get("workload")
    if job.kind not in KINDS or not isinstance(workload, Mapping):
        return []
    limits = {name: workload.get(f"{name}_slo_seconds") for name in WORDS}
    row = main_row_of(job)
    intervals = row.interval if row else {}
    return [
        _target(job, name, float(limit), figures, intervals)
        for name, limit in limits.items()
        if isinstance(limit, int | float) and limit > 0
    ]


def _target(
    job: Job,
    name: str,
    limit: float,
    figures: JobFigures,
    intervals: Mapping[str, tuple[float, float]],
) -> Target:
    metric = f"{name}_p{PERCENT}_seconds"
    figure = figures.get(metric)
    if figure is None or figure.measured is None:
        return Target(name, limit, None, None, "unjudged", _unmeasured_words(job, name))
    words = f"{figure.definition.label}: {figure.shown}"
    if not figure.is_comparable:
        return Target(name, limit, figure, None, "unjudged", f"{words}; {figure.state_words}")
    state: State = "met" if figure.measured <= limit else "missed"
    so_far = " so far" if figure.state == "so_far" else ""
    return Target(name, limit, figure, intervals.get(metric), state, f"{words}{so_far}")


def _unmeasured_words(job: Job, name: str) -> str:
    label = definition_of(f"{name}_p{PERCENT}_seconds").label
    if job.kind == "benchmark" and not job.spec.get("load"):
        return f"{label} needs many requests; measure the plan under load"
    return f"{label} is not measured{'' if job.ended_at else ' yet'}"


def target_json(target: Target) -> dict[str, Any]:
    """Return one target as JSON for the API and exports, times in seconds."""
    return {
        "figure": f"{target.name}_p{PERCENT}_seconds",
        "limit_seconds": target.limit,
        "percentile": PERCENT,
        "measured": target.figure.measured if target.figure else None,
        "state": target.state,
        "chance": target.chance,
    }
