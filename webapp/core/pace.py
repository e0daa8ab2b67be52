"""How often somebody may call: a burst at once, then so many a second, kept in this process.

The limits end loops that went wild and floods from one place; nobody who works as the product
does comes near them. They are kept in memory: a limit that cost a write to the database would be
the flood. Whoever is refused is told the limit and how long to wait.
"""

import math
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from webapp.core.problems import BusyProblem

MOST_KNOWN = 20_000
ROUNDING = 1e-6


class Limit(NamedTuple):
    """What one caller of a kind may do."""

    who: str
    per_second: float
    burst: int

    def sentence(self, wait_seconds: int) -> str:
        """Return what a caller is told who went beyond it."""
        rate = f"{self.per_second:g} times a second, and {self.burst:,} times at once"
        return f"{self.who} may call {rate}; this was more. Wait {wait_seconds} s and go on."


# A host sends its events in batches, beats ten times a minute and uploads 4 MiB a call.
HOST = Limit("One host", 100.0, 2000)
BEAT = Limit("One host's beats", 10.0, 100)
PERSON = Limit("One person", 20.0, 600)
# Calls that show nothing, or a credential that no host has.
STRANGER = Limit("One address without a credential", 5.0, 300)


class Pace:
    """Who called how often; safe to share between threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at: dict[tuple[str, str], float] = {}  # when all of a caller's burst is back

    def keep(self, limit: Limit, caller: str) -> None:
        """Count a call.

        Raises:
            BusyProblem: the caller went beyond the limit; this call does not count.
        """
        instant = self._clock()
        with self._lock:
            if len(self._free_at) >= MOST_KNOWN:
                self._forget_idle(instant)
            before = max(self._free_at.get((limit.who, caller), instant), instant)
            over = before - instant + 1 / limit.per_second - limit.burst / limit.per_second
            if over <= ROUNDING:
                self._free_at[limit.who, caller] = before + 1 / limit.per_second
        if over > ROUNDING:
            wait = math.ceil(over)
            raise BusyProblem("too_many_calls", limit.sentence(wait), retry_after_seconds=wait)

    def _forget_idle(self, instant: float) -> None:
        """Forget whoever has a whole burst; of too many that have not, the oldest half."""
        busy = {key: at for key, at in self._free_at.items() if at > instant}
        kept = list(busy.items())
        self._free_at = dict(kept[-(MOST_KNOWN // 2) :])

    def forget(self) -> None:
        """Forget everybody."""
        with self._lock:
            self._free_at.clear()


calls = Pace()
