"""What a plan says of a server at the load that was measured, beside what was measured.

Nothing here calibrates: the requests of others are not those of a measurement, and nobody knows
what else runs on the machine.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from pydantic import ValidationError

from planner.specs.estimate import Estimate, PlanAnswer, PlanRequest
from planner.specs.workload import ServeWorkload
from webapp.charts.plots import SIDE_WORDS, Prediction
from webapp.core.display import Quantity, counted, deviation_words, number, quantity
from webapp.plans.models import Plan
from webapp.plans.planning import estimate_as_planned
from webapp.plans.verdict import figure_values
from webapp.servers.figures import Window
from webapp.servers.models import ObservedServer

# The planner's names of what a server measures: means, and the percentiles that both have.
COMPARED = {
    "ttft_seconds": "Time to first token, mean",
    "ttft_p95_seconds": "Time to first token, 95th percentile",
    "tpot_seconds": "Time per output token, mean",
    "tpot_p95_seconds": "Time per output token, 95th percentile",
    "latency_seconds": "Whole request, mean",
    "tokens_per_second": "Output tokens a second",
}
LEAST_BUSY = 0.9  # share of looks with requests, from which a rate says how fast the server is
MANIFOLD = 2.0  # from this ratio on a difference is said as a multiple
LEAST_REQUESTS = 10  # fewer are shown, and called few


class Row(NamedTuple):
    """One figure of both: what was measured, what the plan says, and how they differ."""

    name: str
    label: str
    measured: Quantity
    predicted: Prediction | None
    ratio: float | None  # measured ÷ predicted
    side: str  # words for the 80 % interval
    note: str = ""  # why it is not compared
    raw: float | None = None  # the measured value in its base unit

    @property
    def unit(self) -> str:
        """Return the unit of both values."""
        return _unit(self.name)

    @property
    def shown(self) -> Quantity | None:
        """Return the predicted value with its unit."""
        return quantity(self.predicted.value, self.unit) if self.predicted else None

    @property
    def is_outside(self) -> bool:
        """Return whether the measured value lies outside the plan's 80 % interval."""
        said = self.predicted
        if said is None or said.low is None or said.high is None or self.raw is None:
            return False
        return not said.low <= self.raw <= said.high

    @property
    def distance(self) -> str:
        """Return how far the measured value lies from the predicted one, in words."""
        ratio = self.ratio or 1.0
        if ratio >= MANIFOLD:
            return f"is {number(ratio, 2)} times as high as planned"
        if ratio <= 1 / MANIFOLD:
            return f"is {number(1 / ratio, 2)} times lower than planned"
        return f"is {deviation_words(ratio)} the plan"

    @property
    def interval(self) -> str:
        """Return the 80 % interval as words, empty without one."""
        said = self.predicted
        if said is None or said.low is None or said.high is None:
            return ""
        return f"{quantity(said.low, self.unit)} to {quantity(said.high, self.unit)}"


@dataclass(frozen=True)
class Load:
    """The load for which the plan is asked, in tokens a request.

    Without ``has_measured_lengths`` they are the plan's.
    """

    concurrency: int
    input_tokens: int
    output_tokens: int
    has_measured_lengths: bool


@dataclass(frozen=True)
class PlanComparison:
    """A server's window beside its plan; ``load`` is None if there is nothing to compare yet."""

    window: Window
    rows: tuple[Row, ...] = ()
    load: Load | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """Return in a sentence how what was measured lies to the plan, "" if nothing is compared.

        Only figures with an 80 % interval are judged.
        """
        judged = [row for row in self.rows if row.interval]
        if not judged:
            return ""
        outside = [row for row in judged if row.is_outside]
        if not outside:
            are = "the one figure" if len(judged) == 1 else f"all {len(judged)} figures"
            return f"As planned: {are} with an interval inside it"
        is_are = "is" if len(outside) == 1 else "are"
        worst = max(outside, key=lambda row: abs(math.log(row.ratio or 1.0)))
        return (
            f"{len(outside)} of {counted(len(judged), 'figure')} {is_are} outside the plan's 80 % "
            f"interval: "
            f"{worst.label[:1].lower()}{worst.label[1:]} {worst.distance}"
        )

    @property
    def is_few(self) -> bool:
        """Return whether so few requests ended that their mean says little."""
        return self.window.requests is not None and self.window.requests < LEAST_REQUESTS


def compare_with_plan(server: ObservedServer) -> PlanComparison | None:
    """Return the measured window beside what the server's plan says; None without a plan."""
    plan = server.plan
    if plan is None:
        return None
    window = Window.model_validate(server.window or {})
    if plan.deleted_at is not None or not window.figures or window.in_flight is None:
        deleted = "Its plan was deleted: name another one under Change."
        nothing = "Nothing was measured in the last ten minutes yet."
        return PlanComparison(window, note=deleted if plan.deleted_at is not None else nothing)
    try:
        request = PlanRequest.model_validate(plan.request)
        answer = PlanAnswer.model_validate(plan.answer)
    except ValidationError:
        return PlanComparison(
            window, note="The plan was stored by another release: plan it again."
        )
    if not isinstance(request.workload, ServeWorkload) or not answer.plans:
        return PlanComparison(window, note="The plan has no strategy that serves.")
    load = _load(window, request.workload)
    estimate = _estimate(plan.pk, plan.saved_at.isoformat(), load)
    if estimate is None and load.has_measured_lengths:
        load = _load(window.model_copy(update={"input_tokens": None}), request.workload)
        estimate = _estimate(plan.pk, plan.saved_at.isoformat(), load)
    if estimate is None:
        return PlanComparison(
            window, load=load, note="The plan has no figures at the measured load."
        )
    rows = (_row(name, window, estimate) for name in COMPARED)
    return PlanComparison(window, tuple(each for each in rows if each), load)


def _load(window: Window, planned: ServeWorkload) -> Load:
    read, written = window.input_tokens, window.output_tokens
    has_lengths = bool(read and written and read >= 1 and written >= 1)
    return Load(
        max(1, round(window.in_flight or 1)),
        round(read or 1) if has_lengths else planned.input_tokens,
        round(written or 1) if has_lengths else planned.output_tokens,
        has_lengths,
    )


@lru_cache(maxsize=64)
def _estimate(plan_id: str, _saved_at: str, load: Load) -> Estimate | None:
    """Return the estimate of a plan's best strategy in a closed loop of so many requests."""
    plan = Plan.objects.filter(pk=plan_id).first()
    if plan is None:
        return None
    request = PlanRequest.model_validate(plan.request)
    strategy = PlanAnswer.model_validate(plan.answer).plans[0].strategy
    assert isinstance(request.workload, ServeWorkload)  # noqa: S101 -- the caller has checked it
    arrivals = dict.fromkeys(("request_rate_per_second", "burst_requests", "max_request_tokens"))
    lengths = {"input_tokens": load.input_tokens, "output_tokens": load.output_tokens}
    workload = request.workload.model_copy(
        update={**arrivals, **lengths, "concurrency": load.concurrency}
    )
    return estimate_as_planned(request, workload, strategy)


def _row(name: str, window: Window, estimate: Estimate) -> Row | None:
    measured = window.figures.get(name)
    if measured is None:
        return None
    shown = quantity(measured, _unit(name))
    said = figure_values(estimate, name)
    prediction = Prediction(*said) if said else None
    note = ""
    if name == "tokens_per_second" and (window.busy_ratio or 0.0) < LEAST_BUSY:
        prediction = None
        note = f"no request at {1 - (window.busy_ratio or 0.0):.0%} of the looks"
    ratio = measured / prediction.value if prediction and prediction.value else None
    side = SIDE_WORDS[prediction.side_of(measured)].removeprefix(", ") if prediction else ""
    return Row(name, COMPARED[name], shown, prediction, ratio, side, note, measured)


def _unit(name: str) -> str:
    return "tokens_per_second" if name.endswith("_per_second") else "seconds"
