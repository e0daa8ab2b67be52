"""Scrape an engine's Prometheus metrics into the endpoint's figures."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from runners.jobs.serve.figures import Buckets, Figures, Taken

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?$")
_HEADS = ("# HELP ", "# TYPE ")
_BOUND = re.compile(r'\ble="([^"]+)"')
Samples = Mapping[str, float]


class MetricNames(NamedTuple):
    """An engine's names of the metrics in our charts; empty: the engine has no such metric."""

    running: str
    waiting: str
    kv_used: str  # 0 to 1
    prompt_tokens: str
    output_tokens: str
    ttft: str = ""  # a histogram in seconds
    tpot: str = ""  # likewise, one value per token

    @classmethod
    def below(cls, prefix: str, *names: str) -> "MetricNames":
        """Return the names, in this order, of an engine whose metrics share a prefix."""
        return cls(*(f"{prefix}:{name}" for name in names))


class Exposition:
    """One Prometheus page; the processes of a data-parallel engine are summed."""

    def __init__(self, text: str) -> None:
        self.sums: dict[str, float] = defaultdict(float)
        self.most: dict[str, float] = defaultdict(float)
        self.buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
        for name, labels, value in _samples(text):
            self.sums[name] += value
            self.most[name] = max(self.most[name], value)
            if name.endswith("_bucket") and (bound := _BOUND.search(labels)):
                self.buckets[name.removesuffix("_bucket")][float(bound[1])] += value

    def histogram(self, name: str) -> Buckets | None:
        """Return a histogram with non-cumulative counts, or None if the page has none."""
        buckets = sorted(self.buckets[name].items())
        if not buckets:
            return None
        cumulative = [0, *(int(count) for _, count in buckets)]
        counts = tuple(later - earlier for earlier, later in pairwise(cumulative))
        return Buckets(tuple(bound for bound, _ in buckets[:-1]), counts, self.sums[f"{name}_sum"])


class Twice(NamedTuple):
    """Tokens that two engines counted for the same request."""

    prompt: int = 0
    output: int = 0


NOTHING_TWICE = Twice()


class Scraper:
    """Adds the counts of one engine life to an endpoint's figures.

    ``before`` is a page from before the first request; its counts are not added.
    """

    def __init__(self, names: MetricNames, figures: Figures, before: str = "") -> None:
        self._names = names
        self._figures = figures
        self._last = last = Exposition(before)
        self._totals = Twice(
            int(last.sums[names.prompt_tokens]), int(last.sums[names.output_tokens])
        )

    def take(self, text: str, seconds: float, twice: Twice = NOTHING_TWICE) -> bool:
        """Add a page, ``seconds`` after the previous one; return whether there are new tokens.

        ``twice`` holds the tokens that the engines counted twice since they started.
        """
        now, last, names = Exposition(text), self._last, self._names
        prompt, output = self._new_tokens(now, twice)
        self._last = now
        gauges = {
            "running_requests": now.sums[names.running],
            "waiting_requests": now.sums[names.waiting],
            "kv_cache_used_ratio": now.most[names.kv_used],
        }
        self._figures.step(seconds if output else 0.0, output, gauges)
        ttft, tpot = (_since(now, last, name) for name in (names.ttft, names.tpot))
        self._figures.absorb(Taken(prompt, ttft, tpot, text))
        return bool(prompt or output)

    def _new_tokens(self, now: Exposition, twice: Twice) -> Twice:
        """Return the tokens since the last page; totals never decrease."""
        names, previous = self._names, self._totals
        self._totals = Twice(
            max(previous.prompt, int(now.sums[names.prompt_tokens]) - twice.prompt),
            max(previous.output, int(now.sums[names.output_tokens]) - twice.output),
        )
        return Twice(self._totals.prompt - previous.prompt, self._totals.output - previous.output)


def merged(pages: Mapping[str, str]) -> str:
    """Return the pages of several engines as one, with an engine label on each sample.

    The samples of one metric are adjacent, as the format requires.
    """
    families: dict[str, list[str]] = defaultdict(list)
    for engine, text in pages.items():
        family = ""
        for line in text.splitlines():
            if line.startswith(_HEADS):
                family = line.split(" ")[2]
                if line not in families[family]:
                    families[family].append(line)
            elif match := _SAMPLE.match(line):
                name, labels, value = match[1], match[2], match[3]
                family = family if family and name.startswith(family) else name
                labelled = f'slipway_engine="{engine}"' + (f",{labels}" if labels else "")
                families[family].append(f"{name}{{{labelled}}} {value}")
    return "\n".join(line for lines in families.values() for line in lines)


def _since(now: Exposition, last: Exposition, name: str) -> Buckets | None:
    current, previous = now.histogram(name), last.histogram(name)
    if current is None or previous is None or previous.bounds != current.bounds:
        return current
    counts = tuple(new - old for new, old in zip(current.counts, previous.counts, strict=True))
    return Buckets(current.bounds, counts, current.total - previous.total)


def _samples(text: str) -> Iterator[tuple[str, str, float]]:
    for line in text.splitlines():
        if not line.startswith("#") and (match := _SAMPLE.match(line)):
            yield match[1], match[2] or "", float(match[3])
