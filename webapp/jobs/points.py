"""The points of a job's attempts for its charts: the shown attempt's and earlier ones'.

After a retry a job's curves continue. The wait between two attempts is left out: it would
compress the curves to the ends of the axis.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from webapp.charts.figures import MAX_POINTS, Series
from webapp.core.clock import now_ms
from webapp.jobs.models import Attempt, Job
from webapp.metrics.read import Series as StoredSeries
from webapp.metrics.read import read_series

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

    def before(self, current: Series) -> Series:
        """Return a series preceded by the points of earlier attempts."""
        past = self.series.get(current.metric)
        return current if past is None else _joined(past, current)

    def words_of(self, metric: str) -> str:
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
