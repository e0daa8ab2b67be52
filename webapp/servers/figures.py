"""Figures of a server between two readings: rates, means and percentiles of what came between."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from webapp.servers.engines import Histogram, Reading

PERCENTILES = (50, 95, 99)
WINDOW_SECONDS = 600.0  # of the figures beside a plan
METRICS = {"ttft": "ttft", "tpot": "tpot", "latency": "latency"}  # histogram -> name of figures


class Window(BaseModel):
    """What a server did in the last minutes, as it is compared with a plan.

    ``figures`` has the units of the names' endings; ``in_flight`` is the mean of the requests that
    ran or waited at the looks that found any, ``busy_ratio`` the share of those looks.
    """

    model_config = ConfigDict(extra="ignore")

    seconds: float = 0.0
    requests: float | None = None  # that ended; None: the server does not count them
    figures: dict[str, float] = {}
    in_flight: float | None = None
    busy_ratio: float | None = None
    input_tokens: float | None = None  # mean of a request
    output_tokens: float | None = None


def figures_between(before: Reading, after: Reading, seconds: float) -> dict[str, float]:
    """Return the figures of the time between two readings, ``seconds`` apart, by metric name.

    Assumes: the server was not restarted in between (``Reading.is_after_restart``).
    """
    gained = {
        name: value - before.counters[name]
        for name, value in after.counters.items()
        if name in before.counters
    }
    found = _gauges(after)
    if seconds > 0:
        rates = {
            "prompt_tokens_per_second": "prompt_tokens",
            "tokens_per_second": "output_tokens",
            "requests_per_second": "requests",
        }
        found |= {name: gained[key] / seconds for name, key in rates.items() if key in gained}
    if "preemptions" in gained:
        found["preemptions"] = gained["preemptions"]
    if gained.get("prefix_asked") and "prefix_found" in gained:
        found["prefix_hit_ratio"] = min(1.0, gained["prefix_found"] / gained["prefix_asked"])
    for key, name in METRICS.items():
        histogram = after.histograms.get(key)
        came = histogram.since(before.histograms.get(key)) if histogram else None
        if came is not None and came.num_values:
            found |= _of_histogram(name, came)
    if "decode_seconds" in gained and gained.get("output_tokens"):
        found["tpot_seconds"] = gained["decode_seconds"] / gained["output_tokens"]
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _gauges(reading: Reading) -> dict[str, float]:
    names = {
        "running": "running_requests",
        "waiting": "waiting_requests",
        "kv_used": "kv_cache_used_ratio",
    }
    return {shown: reading.gauges[key] for key, shown in names.items() if key in reading.gauges}


def _of_histogram(name: str, came: Histogram) -> dict[str, float]:
    found = {f"{name}_seconds": came.total / came.num_values}
    for percent in PERCENTILES:
        if (value := came.quantile(percent / 100)) is not None:
            found[f"{name}_p{percent}_seconds"] = value
    return found


MOST_KEPT = 256  # readings of a server: more than those of a window


class TimedReading(NamedTuple):
    """A reading and when it was made."""

    at: float  # monotonic seconds
    reading: Reading


@dataclass(frozen=True)
class Progress:
    """What a reading added: the figures since the one before, and those of the window."""

    figures: Mapping[str, float]
    window: Window


class History:
    """The readings of one server within the window; it begins anew when the server does."""

    def __init__(self) -> None:
        self._readings: deque[TimedReading] = deque(maxlen=MOST_KEPT)

    def clear(self) -> None:
        """Forget every reading: what comes next has nothing before it."""
        self._readings.clear()

    def add(self, reading: Reading, at: float) -> Progress:
        """Add a reading at ``at`` (monotonic seconds), and return what it shows.

        The first one, also after a restart, has its gauges only.
        """
        if self._readings and reading.is_after_restart(self._readings[-1].reading):
            self.clear()
        last = self._readings[-1] if self._readings else None
        self._readings.append(TimedReading(at, reading))
        while len(self._readings) > 1 and at - self._readings[0].at > WINDOW_SECONDS:
            self._readings.popleft()
        if last is None:
            return Progress(_gauges(reading), Window())
        return Progress(figures_between(last.reading, reading, at - last.at), self._window())

    def _window(self) -> Window:
        first, last = self._readings[0], self._readings[-1]
        seconds = last.at - first.at
        in_flight = [
            each.reading.in_flight for each in self._readings if each.reading.in_flight is not None
        ]
        busy = [each for each in in_flight if each]
        before, after = first.reading.counters, last.reading.counters
        gained = {name: after[name] - before[name] for name in after if name in before}
        requests = gained.get("requests")
        return Window(
            seconds=seconds,
            requests=requests,
            figures=figures_between(first.reading, last.reading, seconds),
            in_flight=sum(busy) / len(busy) if busy else None,
            busy_ratio=len(busy) / len(in_flight) if in_flight else None,
            input_tokens=_mean(gained.get("prompt_tokens"), requests),
            output_tokens=_mean(gained.get("output_tokens"), requests),
        )


def _mean(total: float | None, number: float | None) -> float | None:
    if total is None or not number:
        return None
    mean = total / number
    return mean if math.isfinite(mean) else None
