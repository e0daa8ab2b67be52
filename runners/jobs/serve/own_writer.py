"""The base of engines that run in processes of their own: waiting, closing and failure."""

import threading
from typing import Protocol

from runners.jobs.serve.contract import EngineProcessError, Limits


class Life(Protocol):
    """The life of an engine process, or of several."""

    @property
    def title(self) -> str:
        """Return the engine's title; of several, that of the one that exited."""

    def how(self) -> str:
        """Return how it exited."""

    def kill(self) -> None:
        """Kill it at once, with every process it started."""


class OwnWriter:
    """One life of an engine in its own process."""

    def __init__(self, process: Life, limits: Limits) -> None:
        self.limits = limits
        self.is_closed = False
        self.changed = threading.Condition()
        self._life = process

    @property
    def is_idle(self) -> bool:
        """Return whether no request is running or queued."""
        raise NotImplementedError

    def wait_until_idle(self, timeout_seconds: float) -> bool:
        """Wait until no request is running or queued; return whether that happened in time."""
        with self.changed:
            return self.changed.wait_for(lambda: self.is_idle, timeout_seconds)

    def close(self) -> None:
        """Kill the engine; unfinished answers end with an error."""
        self.is_closed = True
        self._life.kill()

    def ended(self) -> None:
        """Clean up after the process exited.

        Raises:
            EngineProcessError: it exited without having been closed.
        """
        self._life.kill()  # also kills the processes it started
        if not self.is_closed:
            self.is_closed = True
            raise EngineProcessError(f"{self._life.title} {self._life.how()}")
