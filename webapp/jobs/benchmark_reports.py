"""The reports of a benchmark for its job's page: the load sweep, and the profile of operators."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from pydantic import BaseModel, TypeAdapter, ValidationError

from runners.jobspec import BenchmarkSpec, compress
from runners.jobspec.compress import (
    LIMIT_FIGURES,
    PERCENTILES,
    PHASES,
    LoadReport,
    LoadRow,
    OperatorRow,
    Phase,
    ProfileReport,
)
from runners.shared.load_search import limit_words, target_words
from webapp.charts.plots import ChartSpec
from webapp.charts.timelines import CHARTS, At, SweepChart, sweep_chart
from webapp.core.display import Quantity, flops, number, percent, quantity
from webapp.jobs.models import Artefact, Job

CURVE = "under_load"  # key of the plan's load curve in a job's prediction
CALLERS = {"closed": "clients", "open": "requests a second", "burst": "requests at once"}
CALLER = {"closed": "client", "open": "request a second", "burst": "request"}
KINDS = {
    "closed": "Clients who ask again as soon as they are answered",
    "open": "Requests at random instants",
    "burst": "All requests at one moment",
}
BOUND_WORDS = {
    "compute": "arithmetic",
    "memory_bandwidth": "memory bandwidth",
    "overhead": "the calls themselves",
}
PHASE_WORDS: dict[Phase, str] = {"prefill": "Reading the prompt", "decode": "Writing each token"}
MAX_BARS = 8
BAR_HEIGHT, LABEL_WIDTH, BARS_WIDTH, VALUE_WIDTH = 20, 190, 462, 52
_CURVE: TypeAdapter[list[dict[str, Any]]] = TypeAdapter(list[dict[str, Any]])
Report = TypeVar("Report", bound=BaseModel)


def _report(job: Job, name: str, form: type[Report]) -> Report | None:
    """Return a report of the current attempt; None if it is missing or invalid."""
    attempt = job.current_attempt
    if job.kind != "benchmark" or attempt is None:
        return None
    artefact = Artefact.objects.filter(attempt=attempt, name=name, kind="report").first()
    try:
        return form.model_validate(artefact.facts) if artefact else None
    except ValidationError:
        return None


# Under load


class LoadLine(NamedTuple):
    """One row of a sweep's table: measured figures, and the predicted rate."""

    point: str
    requests: int
    failed: int
    rate: Quantity
    rate_said: Quantity | None
    ttft: tuple[Quantity | None, ...]  # mean and percentiles
    tpot: tuple[Quantity | None, ...]
    latency: tuple[Quantity | None, ...]
    notes: tuple[str, ...]
    is_met: bool | None  # None: no search


@dataclass(frozen=True)
class UnderLoad:
    """A load sweep with its charts and its table; ``planned_limit`` is the plan's limit."""

    report: LoadReport
    charts: tuple[SweepChart, ...]
    lines: tuple[LoadLine, ...]
    planned_limit: float | None = None

    @property
    def limit(self) -> str:
        """Return what a search found as text; empty for a sweep."""
        return limit_words(self.report)

    @property
    def targets(self) -> str:
        """Return a search's targets as text."""
        return target_words(self.report.limit.targets) if self.report.limit else ""

    @property
    def limit_prediction(self) -> str:
        """Return the plan's limit as text, empty if it has none."""
        return "" if self.planned_limit is None else f"{self.planned_limit:.3g} {self.callers}"

    @property
    def callers(self) -> str:
        """Return the unit of the sweep's points."""
        return CALLERS[self.report.arrivals]

    @property
    def notes(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return each point's label with its notes, for points that have notes."""
        singular = CALLER[self.report.arrivals]
        return [
            (f"{line.point} {singular if line.point == '1' else self.callers}", line.notes)
            for line in self.lines
            if line.notes
        ]

    @property
    def kind(self) -> str:
        """Return the arrival process as text."""
        return KINDS[self.report.arrivals]

    @property
    def percents(self) -> tuple[int, ...]:
        """Return the percentiles of the table."""
        return PERCENTILES

    @property
    def repetitions(self) -> int:
        """Return the number of repetitions of a point, of a search the least."""
        return min(row.repetitions for row in self.report.rows)


def load_report(job: Job) -> LoadReport | None:
    """Return the report of a load test; None without one."""
    if not job.spec.get("load"):
        return None
    return _report(job, compress.LOAD_ARTEFACT, LoadReport)


def planned_limit(job: Job, report: LoadReport) -> float | None:
    """Return the highest load within the targets by the plan at launch; None if it has none."""
    said = job.prediction.get(LIMIT_FIGURES.get(report.arrivals, ""))
    return said["value"] if said else None


def under_load(job: Job) -> UnderLoad | None:
    """Return a job's sweep with the plan's prediction of each point; None without a sweep."""
    report = load_report(job)
    if report is None:
        return None
    stored_curve = job.prediction.get(CURVE)  # the plan's, as of the launch
    curve_rows = stored_curve.get("rows") if isinstance(stored_curve, Mapping) else None
    curve = _CURVE.validate_python(curve_rows or [])
    callers, main = CALLERS[report.arrivals], _main_point(job, report)
    charts = tuple(
        sweep_chart(
            chart, callers, _measured(report, chart), _predicted_points(curve, chart), main
        )
        for chart in CHARTS
    )
    rates = _predicted_points(curve, CHARTS[0])
    lines = tuple(_line(row, _value_at(rates, row.point)) for row in report.rows)
    return UnderLoad(report, charts, lines, planned_limit(job, report))


def _value_at(curve: list[At], point: float) -> float | None:
    """Return a curve's value at a point, linear between its own points; None outside of them."""
    points = [each.point for each in curve]
    if not points or not points[0] <= point <= points[-1]:
        return None
    return float(np.interp(point, points, [each.value for each in curve]))


def _main_point(job: Job, report: LoadReport) -> float:
    """Return the point that represents the job."""
    spec = BenchmarkSpec.model_validate(job.spec)
    return spec.load.main_point(spec.batch_size) if spec.load else report.rows[-1].point


def main_row_of(job: Job) -> LoadRow | None:
    """Return the row that represents a job under load; None without a report."""
    report = load_report(job)
    if report is None:
        return None
    main = _main_point(job, report)
    return next((row for row in report.rows if row.point == main), report.rows[-1])


def _metric(chart: ChartSpec) -> str:
    return chart.predicted  # the planner's name, which the rows have too


def _measured(report: LoadReport, chart: ChartSpec) -> list[At]:
    name = _metric(chart)
    return [
        At(row.point, row.measured[name], *row.interval.get(name, (None, None)))
        for row in report.rows
        if name in row.measured
    ]


def _predicted_points(curve: list[dict[str, Any]], chart: ChartSpec) -> list[At]:
    name = _metric(chart)
    return [At(row["point"], *row[name]) for row in curve if name in row]


def _line(row: LoadRow, rate_said: float | None) -> LoadLine:
    def mean_and_percentiles(name: str) -> tuple[Quantity | None, ...]:
        names = [f"{name}_seconds", *(f"{name}_p{each}_seconds" for each in PERCENTILES)]
        values = (row.measured.get(each) for each in names)
        return tuple(None if each is None else quantity(each, "seconds") for each in values)

    return LoadLine(
        point=f"{row.point:g}",
        requests=row.requests,
        failed=row.failed,
        rate=quantity(row.measured.get("tokens_per_second", 0.0), "tokens_per_second"),
        rate_said=None if rate_said is None else quantity(rate_said, "tokens_per_second"),
        ttft=mean_and_percentiles("ttft"),
        tpot=mean_and_percentiles("tpot"),
        latency=mean_and_percentiles("latency"),
        notes=row.notes,
        is_met=row.is_met,
    )


# Operators


class Bar(NamedTuple):
    """One bar of the operator chart, in drawing units."""

    label: str
    share: str
    y: float
    text_y: float
    width: float
    bound: str


class OperatorLine(NamedTuple):
    """One operator in the table."""

    name: str
    shapes: str
    share: str
    seconds: Quantity
    calls: int
    flops: Quantity | None
    bound: str


class ClassLine(NamedTuple):
    """One of the planner's classes: its share of a phase, measured and predicted."""

    name: str
    measured: str
    predicted: str
    bound: str


@dataclass(frozen=True)
class PhaseProfile:
    """One phase: its bars, classes and operators."""

    name: str
    seconds: Quantity
    bars: tuple[Bar, ...]
    classes: tuple[ClassLine, ...]
    lines: tuple[OperatorLine, ...]

    @property
    def height(self) -> int:
        """Return the height of the drawing."""
        return BAR_HEIGHT * len(self.bars)


@dataclass(frozen=True)
class Operators:
    """An operator profile for display."""

    report: ProfileReport
    phases: tuple[PhaseProfile, ...]
    width: int = BARS_WIDTH
    label_x: int = LABEL_WIDTH - 8
    bar_x: int = LABEL_WIDTH

    @property
    def slowdown(self) -> str:
        """Return the slowdown factor of the profiled pass."""
        return number(self.report.slowdown_ratio)


def operators_of(job: Job) -> Operators | None:
    """Return a job's operator profile next to the plan's classes; None without a profile."""
    report = _report(job, compress.OPERATORS_ARTEFACT, ProfileReport)
    if report is None:
        return None
    breakdown = (job.estimate or {}).get("time_breakdown_seconds") or {}
    phases = [
        _phase(report, each, breakdown.get(each) or {}) for each in PHASES if report.of(each)
    ]
    return Operators(report, tuple(phases))


def _phase(report: ProfileReport, phase: Phase, predicted: Mapping[str, float]) -> PhaseProfile:
    rows = report.of(phase)
    total = sum(row.seconds for row in rows) or 1.0
    passes = report.decode_steps if phase == "decode" else 1
    return PhaseProfile(
        name=PHASE_WORDS[phase],
        seconds=quantity(total / passes, "seconds"),
        bars=tuple(_bars(rows, total)),
        classes=tuple(_classes(report.seconds_by_bound(phase), total, predicted)),
        lines=tuple(_operator(row, total) for row in rows),
    )


def _bars(rows: list[OperatorRow], total: float) -> list[Bar]:
    """Return the largest operators, summed over shapes, as bars."""
    sums: dict[str, float] = {}
    bounds: dict[str, str] = {}  # of a name's longest row: rows are sorted longest first
    for row in rows:
        sums[row.name] = sums.get(row.name, 0.0) + row.seconds
        bounds.setdefault(row.name, row.bound)
    largest = sorted(sums.items(), key=lambda item: -item[1])[:MAX_BARS]
    room, longest = BARS_WIDTH - LABEL_WIDTH - VALUE_WIDTH, largest[0][1] or 1.0
    return [
        Bar(
            label=name.removeprefix("aten::")[:28],
            share=percent(seconds / total),
            y=index * BAR_HEIGHT + 4.0,
            text_y=index * BAR_HEIGHT + 14.0,
            width=round(max(1.0, room * seconds / longest), 1),
            bound=bounds[name].replace("_", "-"),
        )
        for index, (name, seconds) in enumerate(largest)
    ]


def _classes(
    measured: Mapping[Any, float], total: float, predicted: Mapping[str, float]
) -> list[ClassLine]:
    whole = sum(predicted.values())
    names = [*measured, *(name for name in predicted if name not in measured and predicted[name])]
    return [
        ClassLine(
            BOUND_WORDS.get(name, name),
            percent(measured.get(name, 0.0) / total),
            percent(predicted.get(name, 0.0) / whole) if whole else "",
            name.replace("_", "-"),
        )
        for name in names
    ]


def _operator(row: OperatorRow, total: float) -> OperatorLine:
    rate = flops(row.flops / row.seconds) if row.flops and row.seconds else None
    return OperatorLine(
        row.name,
        row.shapes,
        percent(row.seconds / total),
        quantity(row.seconds, "seconds"),
        row.calls,
        rate,
        BOUND_WORDS[row.bound],
    )
