"""The engines of one life of an endpoint: one that does all, or some for each phase."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from runners.jobs.serve.relayed.process import LOOK_SECONDS, METRICS, ServerProcess
from runners.jobs.serve.relayed.scrape import Twice, merged

REAP_SECONDS = 1.5


class Engines:
    """They live and end together; without ``prefill`` those of ``decode`` read for themselves.

    Only the door's own loop asks ``lent``; the counts are read from another thread.
    """

    def __init__(
        self, decode: Sequence[ServerProcess], prefill: Sequence[ServerProcess] = ()
    ) -> None:
        self.prefill = tuple(prefill)
        self.decode = tuple(decode)
        self.twice = Twice()  # what both phases counted of the same requests
        self.handed_over = 0  # requests whose cache travelled
        self.undivided = 0  # requests that one engine read and answered
        self._lost: ServerProcess | None = None
        self._asked: Counter[ServerProcess] = Counter()

    @property
    def is_split(self) -> bool:
        """Return whether some read what others answer."""
        return bool(self.prefill)

    @property
    def all(self) -> tuple[ServerProcess, ...]:
        """Return every engine, those that read first."""
        return (*self.prefill, *self.decode)

    @property
    def title(self) -> str:
        """Return what the one is called that ended first, else the first."""
        return (self._lost or self.all[0]).title

    def how(self) -> str:
        """Return how the one ended that ended first."""
        return (self._lost or self.all[0]).how()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until one ends, at most so long; return whether one did."""
        if len(self.all) == 1:
            return self.all[0].wait(timeout_seconds)
        deadline = time.monotonic() + timeout_seconds
        while True:
            if ended := next((each for each in self.all if each.has_ended), None):
                self._lost = self._lost or ended
                return True
            if (left := deadline - time.monotonic()) <= 0:
                return False
            time.sleep(min(LOOK_SECONDS, left))

    def kill(self) -> None:
        """End all of them at once, with all that they started."""
        for each in self.all:
            each.kill()

    def reap(self) -> None:
        """Wait a moment until each is gone for good, once they were killed."""
        for each in self.all:
            each.wait(REAP_SECONDS / len(self.all))

    def peak_bytes(self) -> int:
        """Return the most that the processes of each held, summed."""
        return sum(each.peak_bytes() for each in self.all)

    def page(self) -> str | None:
        """Return their own figures, each sample told apart by its engine; None where one fails."""
        found = [each.get(METRICS) for each in self.all]
        texts = [each.text for each in found if each is not None and each.is_success]
        if len(texts) < len(found):
            return None
        return merged(dict(zip(self._names, texts, strict=True))) if self.is_split else texts[0]

    @property
    def _names(self) -> list[str]:
        phases = (("prefill", self.prefill), ("decode", self.decode))
        return [f"{phase}-{at + 1}" for phase, own in phases for at in range(len(own))]

    @contextmanager
    def lent(self, among: Sequence[ServerProcess]) -> Iterator[ServerProcess]:
        """Lend the engine that has the fewest of our requests while a block asks it."""
        chosen = min(among, key=lambda each: self._asked[each])
        self._asked[chosen] += 1
        try:
            yield chosen
        finally:
            self._asked[chosen] -= 1
