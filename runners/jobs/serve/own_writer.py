"""A writer that is a process of its own, or several: how it is waited for and ended."""

import threading
from typing import Protocol

from runners.jobs.serve.contract import EngineLostError, Limits


class Life(Protocol):
    """The process of an engine from its start to its end, or those of several."""

    @property
    def title(self) -> str:
        """Return what it is called, or which one of several ended."""

    def how(self) -> str:
        """Return how it ended."""

    def kill(self) -> None:
        """End it at once, with all that it started."""


class OwnWriter:
    """One life of an engine that is a process of its own."""

    def __init__(self, process: Life, limits: Limits) -> None:
        self.limits = limits
        self.is_closed = False
        self.changed = threading.Condition()
        self._life = process

    @property
    def is_idle(self) -> bool:
        """Return whether nobody is answered and nobody waits."""
        raise NotImplementedError

    def wait_until_idle(self, timeout_seconds: float) -> bool:
        """Wait until nobody is answered and nobody waits; return whether it came to that."""
        with self.changed:
            return self.changed.wait_for(lambda: self.is_idle, timeout_seconds)

    def close(self) -> None:
        """End the engine; whoever is still being answered hears of it."""
        self.is_closed = True
        self._life.kill()

    def ended(self) -> None:
        """Note that the process is gone.

        Raises:
            EngineLostError: nobody told it to end.
        """
        self._life.kill()  # what it started goes with it
        if not self.is_closed:
            self.is_closed = True
            raise EngineLostError(f"{self._life.title} {self._life.how()}")
