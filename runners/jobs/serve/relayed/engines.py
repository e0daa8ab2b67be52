"""The engines of one endpoint life: a single one, or several for prefill and for decode."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from runners.jobs.serve.relayed.process import LOOK_SECONDS, METRICS, ServerProcess
from runners.jobs.serve.relayed.scrape import Twice, merged

REAP_SECONDS = 1.5


class Engines:
    """Engines that live and end together; without ``prefill``, ``decode`` does both phases.

    ``lent`` is for the HTTP event loop only; the counts are read from another thread.
    """

    def __init__(
        self, decode: Sequence[ServerProcess], prefill: Sequence[ServerProcess] = ()
    ) -> None:
        self.prefill = tuple(prefill)
        self.decode = tuple(decode)
        self.twice = Twice()  # counts that both phases report for the same requests
        self.handed_over = 0  # requests whose KV cache was transferred
        self.undivided = 0  # requests that one engine served alone
        self._first_exited: ServerProcess | None = None
        self._open_requests: Counter[ServerProcess] = Counter()

    @property
    def is_split(self) -> bool:
        """Return whether prefill and decode run in different engines."""
        return bool(self.prefill)

    @property
    def all(self) -> tuple[ServerProcess, ...]:
        """Return every engine, prefill first."""
        return (*self.prefill, *self.decode)

    @property
    def title(self) -> str:
        """Return the title of the engine that exited first, else of the first engine."""
        return (self._first_exited or self.all[0]).title

    def how(self) -> str:
        """Return how the first exited engine ended."""
        return (self._first_exited or self.all[0]).how()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until an engine exits, at most ``timeout_seconds``; return whether one did."""
        if len(self.all) == 1:
            return self.all[0].wait(timeout_seconds)
        deadline = time.monotonic() + timeout_seconds
        while True:
            if ended := next((each for each in self.all if each.has_ended), None):
                self._first_exited = self._first_exited or ended
                return True
            if (left := deadline - time.monotonic()) <= 0:
                return False
            time.sleep(min(LOOK_SECONDS, left))

    def kill(self) -> None:
        """Kill all engines at once, with every process they started."""
        for each in self.all:
            each.kill()

    def reap(self) -> None:
        """Wait briefly until each killed engine has exited."""
        for each in self.all:
            each.wait(REAP_SECONDS / len(self.all))

    def peak_bytes(self) -> int:
        """Return the peak memory of all engines, summed."""
        return sum(each.peak_bytes() for each in self.all)

    def page(self) -> str | None:
        """Return their Prometheus text with an engine label per sample; None if a scrape fails."""
        responses = [each.get(METRICS) for each in self.all]
        texts = [each.text for each in responses if each is not None and each.is_success]
        if len(texts) < len(responses):
            return None
        return merged(dict(zip(self._names, texts, strict=True))) if self.is_split else texts[0]

    @property
    def _names(self) -> list[str]:
        phases = (("prefill", self.prefill), ("decode", self.decode))
        return [f"{phase}-{at + 1}" for phase, own in phases for at in range(len(own))]

    @contextmanager
    def lent(self, among: Sequence[ServerProcess]) -> Iterator[ServerProcess]:
        """Lend the engine with the fewest open requests for the duration of the block."""
        chosen = min(among, key=lambda each: self._open_requests[each])
        self._open_requests[chosen] += 1
        try:
            yield chosen
        finally:
            self._open_requests[chosen] -= 1
