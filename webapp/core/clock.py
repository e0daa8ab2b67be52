"""The clock of the web side; tests set it with time-machine."""

import math
import time
from collections.abc import Callable
from datetime import datetime

from django.utils import timezone


def now() -> datetime:
    """Return the current instant, timezone-aware, by the server's clock."""
    return timezone.now()


def now_ms() -> int:
    """Return the current instant in milliseconds since the Unix epoch."""
    return int(now().timestamp() * 1000)


class LeapWatch:
    """Tells whether the time of day was set, by the monotonic time, between two looks.

    After a leap everything looks as old as the leap is long, until those who report it do again.
    """

    LEAST_SECONDS = 1.0  # of a leap; what corrects a clock gradually is slower

    def __init__(self, rest_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rest_seconds, self._clock = rest_seconds, clock
        self._ahead: float | None = None  # the time of day, of the monotonic time
        self._leapt_at = -math.inf

    def is_recent(self) -> bool:
        """Return whether it was set within the last ``rest_seconds``, since the first look."""
        instant = self._clock()
        before, self._ahead = self._ahead, now().timestamp() - instant
        if before is not None and abs(self._ahead - before) > self.LEAST_SECONDS:
            self._leapt_at = instant
        return instant - self._leapt_at < self._rest_seconds
