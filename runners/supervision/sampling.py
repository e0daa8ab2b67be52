"""Memory and CPU use of a process tree between successive samples of /proc.

Standard library only.
"""

import time
from collections.abc import Callable, Iterable

from runners.supervision.procfs import CLOCK_TICKS_PER_SECOND, Process


class TreeSampler:
    """Turns successive process lists of one tree into metric values."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.peak_rss_bytes = 0
        self._clock = clock
        self._sampled_at = clock()
        self._cpu_ticks: dict[tuple[int, int], int] = {}

    def sample(self, tree: Iterable[Process]) -> dict[str, float]:
        """Return ``rss_bytes`` and ``cpu_utilization`` (cores busy) since the last call.

        Memory is summed over the processes, so shared pages count once per process.
        """
        now, processes = self._clock(), list(tree)
        ticks = {(each.pid, each.start_ticks): each.cpu_ticks for each in processes}
        spent = sum(value - self._cpu_ticks.get(key, 0) for key, value in ticks.items())
        elapsed = max(now - self._sampled_at, 1e-3)
        rss_bytes = sum(each.rss_bytes for each in processes)
        self.peak_rss_bytes = max(self.peak_rss_bytes, rss_bytes)
        self._cpu_ticks, self._sampled_at = ticks, now
        return {
            "rss_bytes": float(rss_bytes),
            "cpu_utilization": spent / CLOCK_TICKS_PER_SECOND / elapsed,
        }
