"""Rate limits in memory, per process: a burst, then a number of calls per second.

The limits stop runaway loops and floods from one address; normal use is far below them. They are
kept in memory because a database write per call would be costly. A rejected caller gets the limit
and the time to wait.
"""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from heapq import nlargest
from typing import NamedTuple

from webapp.core.problems import BusyProblem

MOST_KNOWN = 20_000
ROUNDING = 1e-6


class Limit(NamedTuple):
    """The rate and burst of one kind of caller."""

    who: str
    per_second: float
    burst: int

    def sentence(self, wait_seconds: int) -> str:
        """Return the error message for a caller that exceeded the limit."""
        rate = f"{self.per_second:g} times a second, and {self.burst:,} times at once"
        return (
            f"{self.who} may call {rate}; this call exceeds the limit. Try again in "
            f"{wait_seconds} s."
        )


# A host sends events in batches, ten heartbeats per minute, and 4 MiB per upload call.
HOST = Limit("One host", 100.0, 2000)
BEAT = Limit("One host's heartbeats", 10.0, 100)
PERSON = Limit("One person", 20.0, 600)
# Calls without a credential, or with an unknown one.
STRANGER = Limit("One address without a credential", 5.0, 300)


class Pace:
    """Token bucket counters per caller; thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # Per kind and caller: when the caller's burst is full again.
        self._free_at: dict[str, dict[str, float]] = defaultdict(dict)

    def keep(self, limit: Limit, caller: str) -> None:
        """Count a call.

        Raises:
            BusyProblem: the caller exceeded the limit; this call is not counted.
        """
        if wait := self.count(limit, caller):
            raise BusyProblem("too_many_calls", limit.sentence(wait), retry_after_seconds=wait)

    def count(self, limit: Limit, caller: str, num: int = 1) -> int:
        """Count calls and return 0, or return the seconds to wait if they are too many."""
        instant = self._clock()
        with self._lock:
            free_at = self._free_at[limit.who]
            if len(free_at) >= MOST_KNOWN and caller not in free_at:
                free_at = self._forget_idle(limit.who, instant)
            before = max(free_at.get(caller, instant), instant)
            over = before - instant + (num - limit.burst) / limit.per_second
            if over <= ROUNDING:
                free_at[caller] = before + num / limit.per_second
        return math.ceil(over) if over > ROUNDING else 0

    def rest(self, limit: Limit, caller: str) -> tuple[int, int]:
        """Return how many calls the caller has left at once, and the seconds to a full burst."""
        instant = self._clock()
        with self._lock:
            busy = max(self._free_at[limit.who].get(caller, instant) - instant, 0.0)
        return max(0, math.floor(limit.burst - busy * limit.per_second)), math.ceil(busy)

    def _forget_idle(self, who: str, instant: float) -> dict[str, float]:
        """Delete callers of a kind with a full burst; keep the busiest half of the others.

        A flood of invented callers so forgets its own, and none of another kind.
        """
        busy = ((at, caller) for caller, at in self._free_at[who].items() if at > instant)
        self._free_at[who] = {caller: at for at, caller in nlargest(MOST_KNOWN // 2, busy)}
        return self._free_at[who]

    def forget(self) -> None:
        """Reset all counters."""
        with self._lock:
            self._free_at.clear()


calls = Pace()
