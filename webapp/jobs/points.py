"""Measured points of a job, and the load on its endpoint."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from pydantic import BaseModel, TypeAdapter, ValidationError

from runners.jobspec import BenchmarkSpec, compress
from runners.jobspec.compress import (
    LIMIT_FIGURES,
    ORIGINAL,
    ORIGINAL_PREFIX,
    PERCENTILES,
    PHASES,
    SAVED,
    LoadReport,
    LoadRow,
    OperatorRow,
    Phase,
    ProfileReport,
)
from runners.shared.load_search import limit_words, target_words
from webapp.charts.plots import MAX_POINTS, ChartSpec, Series
from webapp.charts.timelines import CHARTS, At, SweepChart, sweep_chart
from webapp.core.clock import now_ms
from webapp.core.display import Quantity, flops, number, percent, quantity
from webapp.core.figures import REGISTRY, REQUESTS_SERIES, STEP_SERIES, Taking
from webapp.jobs.models import Artefact, Attempt, AttemptEvent, Job
from webapp.metrics.models import MetricSource
from webapp.metrics.store import Range, read_series
from webapp.metrics.store import Series as StoredSeries

# ---------------------------------------------------------------------------
# The points of a job's attempts, and the values of its figures: window, warm-up, statistic.
# ---------------------------------------------------------------------------


GAP_MS = 6_000  # several periods of every metric: a longer silence is drawn as a gap
BREAK_MS = GAP_MS  # width that remains of the wait between two attempts
MOST_EARLIER = 8  # only the newest ones: more would be a few pixels wide each


def series_of(stored: StoredSeries) -> Series:
    """Return a stored series for charts; only silences of at least GAP_MS become gaps."""
    times, values = stored.t_ms.tolist(), stored.value.tolist()
    around = zip([*times[:1], *times], [*times[1:], *times[-1:]], strict=False)
    drawn = [
        (t, value if math.isfinite(value) else None)
        for t, value, (before, after) in zip(times, values, around, strict=True)
        if math.isfinite(value) or after - before >= GAP_MS
    ]
    return Series(stored.metric, tuple(t for t, _ in drawn), tuple(value for _, value in drawn))


def points_of(attempt: Attempt, metrics: Iterable[str]) -> dict[str, Series]:
    """Return an attempt's series of some metrics; those without a point are left out."""
    stored = read_series(attempt.pk, metrics, points=MAX_POINTS)
    return {each.metric: series for each in stored if (series := series_of(each)).t_ms}


class Earlier(NamedTuple):
    """The series of earlier attempts, shifted to end where the shown attempt begins."""

    series: Mapping[str, Series]
    numbers: tuple[int, ...]

    def with_earlier_points(self, current: Series) -> Series:
        """Return a series preceded by the points of earlier attempts."""
        past = self.series.get(current.metric)
        return current if past is None else _joined(past, current)

    def note_on(self, metric: str) -> str:
        """Return the chart note about earlier attempts, empty if there are none."""
        if metric not in self.series:
            return ""
        of = "attempt" if len(self.numbers) == 1 else "attempts"
        named = ", ".join(str(number) for number in self.numbers)
        return f" In front of it {of} {named}, without the wait in between."


def earlier_points(
    job: Job, attempt: Attempt | None, current: Mapping[str, Series], metrics: Iterable[str]
) -> Earlier:
    """Return the points of attempts before ``attempt``; None: before the next one."""
    rank = attempt.node_rank if attempt else 0
    tries = job.attempts.filter(node_rank=rank).order_by("-number")
    if attempt is not None:
        tries = tries.filter(number__lt=attempt.number)
    requested = list(metrics)
    begins = min((each.t_ms[0] for each in current.values()), default=now_ms())
    joined: dict[str, Series] = {}
    numbers: list[int] = []
    for each in tries[:MOST_EARLIER]:
        if not (measured := points_of(each, requested)):
            continue  # withdrawn before it began
        shift = begins - BREAK_MS - max(series.t_ms[-1] for series in measured.values())
        begins = min(series.t_ms[0] for series in measured.values()) + shift
        for name, series in measured.items():
            moved = Series(name, tuple(t + shift for t in series.t_ms), series.values)
            joined[name] = _joined(moved, joined[name]) if name in joined else moved
        numbers.insert(0, each.number)
    return Earlier(joined, tuple(numbers))


def _joined(past: Series, later: Series) -> Series:
    """Return two parts of a series as one, with a gap between them."""
    if not later.t_ms:
        return past
    middle = (past.t_ms[-1] + later.t_ms[0]) // 2
    return Series(
        later.metric,
        (*past.t_ms, middle, *later.t_ms),
        (*past.values, None, *later.values),
    )


# Values of a job's figures from its stored points: window, warm-up, statistic.


GPU = "gpu"
HOST_SERIES = "rss_bytes"
GPU_ENDING = "_memory_bytes"


class PartialValue(NamedTuple):
    """A value with the number of counted items (such as steps), and the number required."""

    value: float
    num_seen: int
    needed: int


class Window(NamedTuple):
    """A phase's interval in ms; ``end`` is ``ALWAYS.end`` while the phase runs."""

    start: int
    end: int

    def holds(self, t_ms: int) -> bool:
        """Return whether an instant lies in the window."""
        return self.start <= t_ms < self.end


# Series that a compression reports for both models.
REGISTRY_SERIES = frozenset(
    f"{ORIGINAL_PREFIX}{taking.series}"
    for each in REGISTRY.values()
    if (taking := each.taking("compress")).phase == SAVED
)
ALWAYS = Window(-(2**62), 2**62)
NEVER = Window(0, 0)


class PointsTaken:
    """Reads the points of a job's current attempt; each series is read once, on demand."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._attempt: Attempt | None = job.current_attempt
        self._series: dict[str, Series] = {}
        self._read: set[str] = set()
        self._phases: dict[str, Window] | None = None

    def value(self, taking: Taking) -> PartialValue | None:
        """Return the current value of a taking; None before its window has a point."""
        if self._attempt is None:
            return None
        if taking.series in {HOST_SERIES, GPU}:
            return self._highest_sample(self._attempt, taking)
        window = self._window(taking)
        points = [(t, value) for t, value in self._points(taking.series) if window.holds(t)]
        if not points:
            return None
        count, begins = self._counted(taking, window, [t for t, _ in points])
        counted = [value for t, value in points if t >= begins] or [value for _, value in points]
        return PartialValue(_statistic(taking, counted), count, self._needed(taking))

    # Windows and counts

    def _window(self, taking: Taking) -> Window:
        if not taking.phase:
            return ALWAYS
        if self._phases is None:
            self._phases = _phases_of(self._attempt)
        # Jobs of older agents, and drills, report no phases: the window is the whole job.
        return self._phases.get(taking.phase, NEVER if self._phases else ALWAYS)

    def _counted(self, taking: Taking, window: Window, times: list[int]) -> tuple[int, int]:
        """Return the number of counted items, and the instant from which values count."""
        if taking.counted == "requests":
            requests = self._points(REQUESTS_SERIES)
            return (int(requests[-1][1]) if requests else 0), times[0]
        if taking.counted != "steps":
            return len(times), times[0]
        steps = [(t, int(step)) for t, step in self._points(STEP_SERIES) if window.holds(t)]
        if not steps:
            return len(times), times[min(taking.skipped, len(times) - 1)]
        first = steps[0][1]
        begins = next((t for t, step in steps if step >= first + taking.skipped), steps[-1][0] + 1)
        return steps[-1][1] - first + 1, begins

    def _needed(self, taking: Taking) -> int:
        """Return the count from which a value is evaluated, at most the length of a short job."""
        job = self._job
        if taking.counted == "steps" and job.progress_unit == "steps" and job.progress_total:
            return max(1, min(taking.judged_from, int(job.progress_total)))
        if taking.counted == "repetitions" and job.spec.get("repetitions"):
            return max(1, min(taking.judged_from, int(job.spec["repetitions"])))
        return taking.judged_from

    # Points

    def _points(self, name: str) -> list[tuple[int, float]]:
        """Return the finite points of a metric; an original's may have the plain name."""
        bare = name.removeprefix(ORIGINAL_PREFIX)
        series = self._series_of(name)
        if name != bare and not series.known:
            series = self._series_of(bare)
        return [
            (t, value)
            for t, value in zip(series.t_ms, series.values, strict=True)
            if value is not None
        ]

    def _series_of(self, name: str) -> Series:
        if name not in self._read and self._attempt is not None:
            names = self._kind_metrics() | {name, name.removeprefix(ORIGINAL_PREFIX)}
            self._series |= points_of(self._attempt, names - self._read)
            self._read |= names
        return self._series.get(name, Series(name))

    def _kind_metrics(self) -> set[str]:
        """Return the metrics that this kind of job needs anyway: one read for all."""
        takings = [each.taking(self._job.kind) for each in REGISTRY.values()]
        names = {each.series for each in takings if each.series and each.series != GPU}
        return (names | {STEP_SERIES, REQUESTS_SERIES}) - {HOST_SERIES}

    def _highest_sample(self, attempt: Attempt, taking: Taking) -> PartialValue | None:
        if taking.series == HOST_SERIES:
            highest = highest_host_sample(attempt)
        else:
            highest = highest_of(attempt, gpu_memories(attempt))
        return PartialValue(highest, 1, 1) if highest else None


def of_one_model(job: Job, own: Mapping[str, Series]) -> dict[str, Series]:
    """Return a compression's series, with the original model's points separated.

    Older hosts report both models under one name; the phase distinguishes the points.
    """
    attempt = job.current_attempt
    phases = _phases_of(attempt) if job.kind == "compress" and attempt else {}
    if ORIGINAL not in phases:
        return dict(own)
    separated = dict(own)
    for name in [name for name in own if f"{ORIGINAL_PREFIX}{name}" in REGISTRY_SERIES]:
        before = f"{ORIGINAL_PREFIX}{name}"
        if before not in separated:
            separated[before] = _within(own[name], phases[ORIGINAL], before)
        separated[name] = _within(own[name], phases.get(SAVED, NEVER), name)
    return separated


def points_since(
    attempt: Attempt, metrics: Iterable[str], since_ms: int
) -> dict[str, list[tuple[int, float]]]:
    """Return the points of some metrics since an instant, as (instant in ms, value)."""
    span = Range(since_ms)
    stored = read_series(attempt.pk, metrics, span, points=MAX_POINTS)
    series = {each.metric: series_of(each) for each in stored}
    if attempt.pk == attempt.job.current_attempt_id:
        series = of_one_model(attempt.job, series)
    return {
        name: [
            (t, value)
            for t, value in zip(each.t_ms, each.values, strict=True)
            if value is not None
        ]
        for name, each in series.items()
    }


def _within(series: Series, window: Window, name: str) -> Series:
    points = [
        (t, value) for t, value in zip(series.t_ms, series.values, strict=True) if window.holds(t)
    ]
    return Series(name, tuple(t for t, _ in points), tuple(value for _, value in points))


def highest_of(attempt: Attempt, names: Iterable[str]) -> float:
    """Return the highest point of some metrics, including rolled-up maxima; 0 without points."""
    stored = read_series(attempt.pk, names, points=MAX_POINTS) if names else []
    tops = [float(np.nanmax(each.high)) for each in stored if np.isfinite(each.high).any()]
    return max(tops, default=0.0)


def highest_host_sample(attempt: Attempt) -> float:
    """Return the peak total bytes of an attempt's processes; 0 before a sample.

    The supervisor's recorded peak counts too: it samples more often than it reports.
    """
    recorded = float(attempt.exit_record.get("peak_rss_bytes") or 0)
    return max(highest_of(attempt, [HOST_SERIES]), recorded)


def gpu_memories(attempt: Attempt) -> list[str]:
    """Return the names of an attempt's GPU memory series."""
    stored = MetricSource.objects.filter(attempt_id=attempt.pk, source=GPU).first()
    return [name for name in (stored.metrics if stored else ()) if name.endswith(GPU_ENDING)]


def _phases_of(attempt: Attempt | None) -> dict[str, Window]:
    """Return the interval of each phase of an attempt, by the host's clock."""
    events = AttemptEvent.objects.filter(attempt=attempt, kind="phase").order_by("seq")
    starts = [(str(body.get("name", "")), t) for body, t in events.values_list("body", "t_ms")]
    ends = [*(t for _, t in starts[1:]), ALWAYS.end][: len(starts)]
    windows: dict[str, Window] = {}
    for (name, start), end in zip(starts, ends, strict=True):
        windows[name] = Window(windows[name].start if name in windows else start, end)
    return windows


def _statistic(taking: Taking, values: list[float]) -> float:
    if taking.statistic == "highest":
        return max(values)
    if taking.statistic == "latest":
        return values[-1]
    return statistics.median(values)


# ---------------------------------------------------------------------------
# A benchmark's load sweep and operator profile for the job's page.
# ---------------------------------------------------------------------------


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
