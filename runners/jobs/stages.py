"""Combines the unequal phases of a job into one monotonic progress figure."""

import copy
import time
from collections.abc import Mapping

from runners.jobs.events import Emitter

WHOLE = 100.0


class Stages:
    """Phases of a job by name and expected share of its time; shares need not sum to one."""

    def __init__(self, emitter: Emitter, shares: Mapping[str, float]) -> None:
        total = sum(shares.values())
        self._emitter = emitter
        self._shares = {name: share / total for name, share in shares.items()}
        self._began = time.monotonic()
        self._current = ""
        self._before = 0.0

    def via(self, emitter: Emitter) -> "Stages":
        """Return a view of the same progress with a forked process's emitter."""
        view = copy.copy(self)
        view._emitter = emitter  # noqa: SLF001 - a copy of this very class
        return view

    def begin(self, name: str) -> None:
        """Begin the named phase; all earlier phases count as done."""
        names = list(self._shares)
        index = names.index(name)
        self._before = sum(self._shares[each] for each in names[:index])
        self._current = name
        self._emitter.phase(name)
        self._emit(self._before)

    def advance(self, fraction: float) -> None:
        """Report the completed fraction of the current phase."""
        self._emit(self._before + self._shares[self._current] * min(1.0, fraction))

    def _emit(self, done: float) -> None:
        elapsed = time.monotonic() - self._began
        eta = elapsed * (1.0 - done) / done if done > 0.0 else None
        self._emitter.progress(WHOLE * done, WHOLE, "percent", eta)
