"""What an endpoint measures of itself: for Prometheus, for the job's charts, for its result."""

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

TTFT_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
TPOT_BOUNDS = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5)  # seconds


@dataclass
class Histogram:
    """Counts of values up to each bound, and their sum, as Prometheus has them."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """Return how many values were seen."""
        return sum(self.counts)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def absorb(self, bounds: tuple[float, ...], counts: Sequence[int], total: float) -> None:
        """Count values that somebody else put into buckets of their own."""
        if bounds != self.bounds:
            self.bounds, self.counts = bounds, [0] * (len(bounds) + 1)
        self.counts = [own + new for own, new in zip(self.counts, counts, strict=True)]
        self.total += total

    def lines(self, name: str) -> Iterator[str]:
        """Yield the exposition of the histogram."""
        seen = 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            seen += count
            yield f'{name}_bucket{{le="{bound}"}} {seen}'
        yield f"{name}_sum {self.total}"
        yield f"{name}_count {seen}"


class Buckets(NamedTuple):
    """Values by the bound that they stay below, the last beyond all of them, and their sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Taken(NamedTuple):
    """What an engine's own figures brought since the last look."""

    prompt_tokens: int = 0
    ttft: Buckets | None = None
    tpot: Buckets | None = None
    text: str = ""


class Figures:
    """Counters and histograms; the engine writes them, the door and the job read them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.ttft = Histogram(TTFT_BOUNDS)
        self.tpot = Histogram(TPOT_BOUNDS)
        self.counters = {"requests": 0, "failed": 0, "cancelled": 0, "refused": 0}
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.busy_seconds = 0.0
        self.gauges = {"running_requests": 0.0, "waiting_requests": 0.0, "kv_cache_used_ratio": 0}
        self.engine_text = ""  # an engine's own exposition, under its own names
        self._told: tuple[float, ...] = (0.0,) * 5

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        """Count the first token of an answer, and how long it took since the request."""
        with self._lock:
            self.ttft.add(seconds)
            self.prompt_tokens += prompt_tokens

    def later_token(self, seconds: float) -> None:
        """Count a further token and the time since the one before it."""
        with self._lock:
            self.tpot.add(seconds)

    def step(self, seconds: float, tokens: int, gauges: Mapping[str, float]) -> None:
        """Count one forward pass."""
        with self._lock:
            self.busy_seconds += seconds
            self.output_tokens += tokens
            self.gauges.update(gauges)

    def absorb(self, taken: Taken) -> None:
        """Add what an engine that counts for itself counted since it was asked last."""
        with self._lock:
            if taken.ttft is not None:
                self.ttft.absorb(*taken.ttft)
            if taken.tpot is not None:
                self.tpot.absorb(*taken.tpot)
            self.prompt_tokens += taken.prompt_tokens
            self.engine_text = taken.text

    def count(self, name: str) -> None:
        """Count a request that ended, or was refused, in the named way."""
        with self._lock:
            self.counters[name] += 1

    def since_last(self, seconds: float) -> dict[str, float]:
        """Return what happened since this was last asked, under the names of the charts."""
        with self._lock:
            now = (*_parts(self.ttft), *_parts(self.tpot), self.output_tokens)
            first, first_sum, later, later_sum, tokens = (
                new - old for new, old in zip(now, self._told, strict=True)
            )
            self._told = now
            found = {**self.gauges, "tokens_per_second": tokens / seconds}
        found |= {"ttft_seconds": first_sum / first} if first else {}
        found |= {"tpot_seconds": later_sum / later} if later else {}
        return found

    def measured(self) -> dict[str, float]:
        """Return the figures of the whole life, as a result has them."""
        with self._lock:
            found = {name: float(count) for name, count in self.counters.items()}
            found |= {"output_tokens": float(self.output_tokens)}
            found |= {"prompt_tokens": float(self.prompt_tokens)}
            for name, histogram in (("ttft_seconds", self.ttft), ("tpot_seconds", self.tpot)):
                found |= {name: histogram.total / histogram.count} if histogram.count else {}
            if self.busy_seconds:
                found["tokens_per_second"] = self.output_tokens / self.busy_seconds
        return found

    def prometheus(self) -> str:
        """Return the text that Prometheus scrapes."""
        with self._lock:
            return "\n".join([*self._exposition(), self.engine_text])

    def _exposition(self) -> Iterator[str]:
        for name, value in self.gauges.items():
            yield f"# TYPE slipway_{name} gauge"
            yield f"slipway_{name} {value}"
        counters = {f"requests_{name}": count for name, count in self.counters.items()}
        counters |= {"prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens}
        for name, count in counters.items():
            yield f"# TYPE slipway_{name}_total counter"
            yield f"slipway_{name}_total {count}"
        for name, histogram in (("ttft_seconds", self.ttft), ("tpot_seconds", self.tpot)):
            yield f"# TYPE slipway_{name} histogram"
            yield from histogram.lines(f"slipway_{name}")


def _parts(histogram: Histogram) -> tuple[int, float]:
    return histogram.count, histogram.total
