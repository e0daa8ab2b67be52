"""A search for the highest load that meets latency targets: its next level, its limit, in words.

It reads no clock and sends no request: a job measures the levels, and the planner predicts them.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from runners.jobspec.compress import LoadLimit, LoadReport, SearchEnding

RESOLUTION = 1.07  # a bracket is narrow enough if its upper end is at most this times the lower
NEAR = 0.05  # of a target: a level as close to it is measured once more
DIGITS = 3  # of a level that is not whole
UNITS = {  # plural, singular
    "closed": ("clients", "client"),
    "open": ("requests a second", "request a second"),
}
ENDINGS = {
    "points": "the search ended there, at its limit of measurements",
    "seconds": "the search ended there, at its time limit",
}
TIMES = {"ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}


class LevelSearch:
    """Chooses the levels of a search, one after another.

    From the first level it doubles, or halves, until one level meets the targets and a higher one
    misses them. Then it measures the geometric middle, until their ratio is ``resolution``.

    The median of its repetitions decides a level, so that one that was disturbed does not. A level
    within ``NEAR`` of a target, or whose repetitions disagree about it, is measured once more; no
    other level is measured twice.

    ``is_whole``: levels are whole numbers from 1. ``max_points``: measurements, repeated ones
    included.
    """

    def __init__(
        self,
        first: float,
        *,
        highest: float,
        is_whole: bool,
        max_points: int,
        resolution: float = RESOLUTION,
    ) -> None:
        self.num_points = 0
        self.met: float | None = None
        self.missed: float | None = None
        self._first = first
        self._highest = highest
        self._is_whole = is_whole
        self._max_points = max_points
        self._resolution = resolution
        self._again: float | None = None  # measured once, too close to a target
        self._before: tuple[float | None, float | None] = (None, None)  # bracket without it

    def next_level(self) -> float | None:
        """Return the level to measure; None once the search has ended."""
        if self.num_points >= self._max_points:
            return None
        return self._proposed() if self._again is None else self._again

    def record(self, level: float, excesses: Sequence[float]) -> bool:
        """Take the excess of each repetition of a level, earlier ones too; return if it is met.

        The excess is a figure over its target, the largest of all targets.
        """
        self.num_points += 1
        excess = statistics.median(excesses)
        is_met = excess <= 1.0
        if level == self._again:
            self.met, self.missed = self._before
            self._again = None
        elif abs(excess - 1.0) <= NEAR or len({each <= 1.0 for each in excesses}) > 1:
            self._before = self.met, self.missed
            self._again = level
        if is_met:
            self.met = level
        else:
            self.missed = level
        return is_met

    @property
    def ending(self) -> SearchEnding:
        """Return why there is no next level; of a search that was stopped, for its time."""
        if self._proposed() is None:
            if self.missed is None:
                return "highest"
            return "lowest" if self.met is None else "found"
        return "points" if self.num_points >= self._max_points else "seconds"

    def _proposed(self) -> float | None:
        met, missed = self.met, self.missed
        if met is None and missed is None:
            return self._first
        if met is None or missed is None:
            return self._beyond(met, missed)
        if missed <= self._resolution * met:
            return None
        middle = self._rounded(math.sqrt(met * missed))
        if self._is_whole:
            middle = max(middle, met + 1.0)
        return middle if met < middle < missed else None

    def _beyond(self, met: float | None, missed: float | None) -> float | None:
        """Return twice the highest level or half of the lowest one, None at the end."""
        if met is not None:
            return min(2.0 * met, self._highest) if met < self._highest else None
        half = self._rounded((missed or 0.0) / 2.0)
        return half if half > 0.0 else None

    def _rounded(self, level: float) -> float:
        return float(math.floor(level)) if self._is_whole else float(f"{level:.{DIGITS}g}")


def excess_of(targets: Mapping[str, float], measured: Mapping[str, float], failed: int) -> float:
    """Return the largest figure over its target; infinite without one, or if a request failed.

    >>> excess_of({"ttft_p95_seconds": 1.0}, {"ttft_p95_seconds": 0.5}, failed=0)
    0.5
    """
    if failed or not targets.keys() <= measured.keys():
        return math.inf
    return max(measured[name] / limit for name, limit in targets.items())


def missed_targets(
    targets: Mapping[str, float], repetitions: Sequence[Mapping[str, float]]
) -> Iterable[str]:
    """Yield each target that a level misses, with the median of its repetitions' figures."""
    for name, limit in targets.items():
        values = [each[name] for each in repetitions if name in each]
        if values and (middle := statistics.median(values)) > limit:
            yield (
                f"{figure_words(name)} is {middle:.3g} s, the median of {len(values)} "
                f"repetitions, and the target {limit:g} s"
            )


def figure_words(name: str) -> str:
    """Return a latency figure in short.

    >>> figure_words("ttft_p95_seconds"), figure_words("tpot_seconds")
    ('TTFT p95', 'mean TPOT')
    """
    time, _, percentile = name.removesuffix("_seconds").partition("_")
    return f"{TIMES[time]} {percentile}" if percentile else f"mean {TIMES[time]}"


def target_words(targets: Mapping[str, float]) -> str:
    """Return latency targets as text.

    >>> target_words({"ttft_p95_seconds": 1.0, "tpot_p95_seconds": 0.05})
    'TTFT p95 within 1 s and TPOT p95 within 0.05 s'
    """
    return " and ".join(
        f"{figure_words(name)} within {limit:g} s" for name, limit in targets.items()
    )


def limit_words(report: LoadReport) -> str:
    """Return what a search found, as a sentence without its stop; "" for a sweep."""
    limit = report.limit
    if limit is None:
        return ""
    end = f"; {ENDINGS[limit.ending]}" if limit.ending in ENDINGS else ""
    if limit.missed is None:
        reached = _level_words(report, limit.met or 0.0)
        most = ", the most that the endpoint has places for" if report.arrivals == "closed" else ""
        return (
            f"The targets are met at every level that was tried, up to {reached}"
            f"{most if limit.ending == 'highest' else ''}{end}"
        )
    if limit.met is None:
        least = _level_words(report, limit.missed)
        return f"The targets are missed at the lowest level that was tried, {least}{end}"
    return f"The limit lies between {limit.met:g} and {_level_words(report, limit.missed)}{end}"


def _level_words(report: LoadReport, level: float) -> str:
    return f"{level:g} {UNITS[report.arrivals][level == 1]}"


def limit_of(search: LevelSearch, targets: Mapping[str, float]) -> LoadLimit:
    """Return what a search that has ended found."""
    return LoadLimit(
        targets=dict(targets), met=search.met, missed=search.missed, ending=search.ending
    )
