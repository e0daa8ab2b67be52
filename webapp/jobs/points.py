"""Measured points of a job's attempts, and what its figures take of them: window, statistic."""

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from runners.jobspec.compress import (
    ORIGINAL,
    ORIGINAL_PREFIX,
    SAVED,
)
from webapp.charts.plots import MAX_POINTS, Series
from webapp.core.clock import now_ms
from webapp.core.figures import REGISTRY, REQUESTS_SERIES, STEP_SERIES, Taking
from webapp.jobs.models import Attempt, AttemptEvent, Job
from webapp.metrics.models import MetricSource
from webapp.metrics.store import Range, read_series
from webapp.metrics.store import Series as StoredSeries

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
