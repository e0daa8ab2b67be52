"""An endpoint's own metrics: for Prometheus, for the job's charts and for its result."""

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from runners.jobspec.compress import PERCENTILES

TTFT_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
# The targets that a plan may have, 0.03 and 0.05 s, are bucket bounds, so they evaluate exactly.
TPOT_BOUNDS = (
    0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5,
)  # fmt: skip


@dataclass
class Histogram:
    """A Prometheus histogram: counts per bucket and the sum of the values."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """Return the number of values."""
        return sum(self.counts)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def absorb(self, bounds: tuple[float, ...], counts: Sequence[int], total: float) -> None:
        """Add values that were counted elsewhere, in buckets of their own."""
        if bounds != self.bounds:
            self.bounds, self.counts = bounds, [0] * (len(bounds) + 1)
        self.counts = [own + new for own, new in zip(self.counts, counts, strict=True)]
        self.total += total

    def percentile(self, percent: int) -> float:
        """Return the value that ``percent`` of 100 do not exceed, interpolated within its bucket.

        Same as Prometheus's ``histogram_quantile``; beyond the last bound it returns that bound.
        Assumes: there is at least one value.
        """
        rank, cumulative, low = percent * self.count / 100, 0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and cumulative + count >= rank:
                return low + (bound - low) * (rank - cumulative) / count
            cumulative, low = cumulative + count, bound
        return self.bounds[-1]

    def lines(self, name: str) -> Iterator[str]:
        """Yield the histogram in the Prometheus text format."""
        cumulative = 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            cumulative += count
            yield f'{name}_bucket{{le="{bound}"}} {cumulative}'
        yield f"{name}_sum {self.total}"
        yield f"{name}_count {cumulative}"


class Buckets(NamedTuple):
    """Counts per bucket bound, the last one for values beyond every bound, and the sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class ScrapedMetrics(NamedTuple):
    """What an engine's own metrics gained since the last scrape."""

    prompt_tokens: int = 0
    ttft: Buckets | None = None
    tpot: Buckets | None = None
    text: str = ""


class EndpointMetrics:
    """Counters and histograms; the engine writes them, the HTTP server and the job read them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.ttft = Histogram(TTFT_BOUNDS)
        self.tpot = Histogram(TPOT_BOUNDS)
        self.counters = {"requests": 0, "failed": 0, "cancelled": 0, "refused": 0}
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.busy_seconds = 0.0
        self.gauges = {"running_requests": 0.0, "waiting_requests": 0.0, "kv_cache_used_ratio": 0}
        self.engine_text = ""  # the engine's own Prometheus text, with its own metric names
        self._last_totals: tuple[float, ...] = (0.0,) * 5

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        """Record the first token of an answer and the seconds since the request."""
        with self._lock:
            self.ttft.add(seconds)
            self.prompt_tokens += prompt_tokens

    def later_token(self, seconds: float) -> None:
        """Record a further token and the seconds since the previous one."""
        with self._lock:
            self.tpot.add(seconds)

    def step(self, seconds: float, tokens: int, gauges: Mapping[str, float]) -> None:
        """Record one forward pass."""
        with self._lock:
            self.busy_seconds += seconds
            self.output_tokens += tokens
            self.gauges.update(gauges)

    def absorb(self, scraped: ScrapedMetrics) -> None:
        """Add what an engine with its own counters counted since the last scrape."""
        with self._lock:
            if scraped.ttft is not None:
                self.ttft.absorb(*scraped.ttft)
            if scraped.tpot is not None:
                self.tpot.absorb(*scraped.tpot)
            self.prompt_tokens += scraped.prompt_tokens
            self.engine_text = scraped.text

    def count(self, name: str) -> None:
        """Count a request under the named outcome."""
        with self._lock:
            self.counters[name] += 1

    def since_last(self, seconds: float) -> dict[str, float]:
        """Return the figures since the last call, by chart name."""
        with self._lock:
            now = (*_count_and_sum(self.ttft), *_count_and_sum(self.tpot), self.output_tokens)
            first, first_sum, later, later_sum, tokens = (
                new - old for new, old in zip(now, self._last_totals, strict=True)
            )
            self._last_totals = now
            figures = {**self.gauges, "tokens_per_second": tokens / seconds}
        figures |= {"ttft_seconds": first_sum / first} if first else {}
        figures |= {"tpot_seconds": later_sum / later} if later else {}
        return figures | self.so_far()

    def so_far(self) -> dict[str, float]:
        """Return the figures of the whole run so far, by chart name.

        ``since_last`` covers the time since the last call; these become the job's result.
        """
        with self._lock:
            figures = {"answered_requests": float(self.ttft.count)}
            for name, histogram in (("ttft", self.ttft), ("tpot", self.tpot)):
                if histogram.count:
                    figures[f"{name}_mean_seconds"] = histogram.total / histogram.count
                    figures |= _percentiles(name, histogram)
            if self.busy_seconds:
                figures["busy_tokens_per_second"] = self.output_tokens / self.busy_seconds
        return figures

    def result_metrics(self) -> dict[str, float]:
        """Return the figures of the whole run, by result name."""
        with self._lock:
            figures = {name: float(count) for name, count in self.counters.items()}
            figures |= {"output_tokens": float(self.output_tokens)}
            figures |= {"prompt_tokens": float(self.prompt_tokens)}
            for name, histogram in (("ttft_seconds", self.ttft), ("tpot_seconds", self.tpot)):
                figures |= {name: histogram.total / histogram.count} if histogram.count else {}
                figures |= _percentiles(name.removesuffix("_seconds"), histogram)
            if self.busy_seconds:
                figures["tokens_per_second"] = self.output_tokens / self.busy_seconds
        return figures

    def prometheus(self) -> str:
        """Return the Prometheus text."""
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


def _percentiles(name: str, histogram: Histogram) -> dict[str, float]:
    if not histogram.count:
        return {}
    return {f"{name}_p{each}_seconds": histogram.percentile(each) for each in PERCENTILES}


def _count_and_sum(histogram: Histogram) -> tuple[int, float]:
    return histogram.count, histogram.total
