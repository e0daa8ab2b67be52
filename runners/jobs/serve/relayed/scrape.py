"""Read an engine's own Prometheus figures into ours."""

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
    """What an engine calls the figures of our charts; empty: it has none of the kind."""

    running: str
    waiting: str
    kv_used: str  # 0 to 1
    prompt_tokens: str
    output_tokens: str
    ttft: str = ""  # a histogram in seconds
    tpot: str = ""  # likewise, a value a token

    @classmethod
    def below(cls, prefix: str, *names: str) -> "MetricNames":
        """Return the names, in this order, of an engine whose figures all begin alike."""
        return cls(*(f"{prefix}:{name}" for name in names))


class Exposition:
    """One page of figures, the processes of a data-parallel engine taken together."""

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
        """Return a histogram's counts by bucket, not cumulated; None where there is none."""
        found = sorted(self.buckets[name].items())
        if not found:
            return None
        seen = [0, *(int(count) for _, count in found)]
        counts = tuple(later - earlier for earlier, later in pairwise(seen))
        return Buckets(tuple(bound for bound, _ in found[:-1]), counts, self.sums[f"{name}_sum"])


class Twice(NamedTuple):
    """Tokens that two engines counted, though one request has them once."""

    prompt: int = 0
    output: int = 0


NOTHING_TWICE = Twice()


class Scraper:
    """Adds what one life of an engine counts to an endpoint's figures.

    ``before`` is a page of what it counted before anybody asked, which is not added.
    """

    def __init__(self, names: MetricNames, figures: Figures, before: str = "") -> None:
        self._names = names
        self._figures = figures
        self._last = last = Exposition(before)
        self._told = Twice(
            int(last.sums[names.prompt_tokens]), int(last.sums[names.output_tokens])
        )

    def take(self, text: str, seconds: float, twice: Twice = NOTHING_TWICE) -> bool:
        """Take in a page, ``seconds`` after the one before; return whether tokens came.

        ``twice`` has what the page counts double since its engines began.
        """
        now, last, names = Exposition(text), self._last, self._names
        prompt, output = self._since_told(now, twice)
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

    def _since_told(self, now: Exposition, twice: Twice) -> Twice:
        """Return the tokens since the last page; what was told once is never taken back."""
        names, told = self._names, self._told
        self._told = Twice(
            max(told.prompt, int(now.sums[names.prompt_tokens]) - twice.prompt),
            max(told.output, int(now.sums[names.output_tokens]) - twice.output),
        )
        return Twice(self._told.prompt - told.prompt, self._told.output - told.output)


def merged(pages: Mapping[str, str]) -> str:
    """Return the pages of several engines as one: each sample names its engine.

    The samples of one figure stand together, as the format asks.
    """
    families: dict[str, list[str]] = defaultdict(list)
    for engine, text in pages.items():
        family = ""
        for line in text.splitlines():
            if line.startswith(_HEADS):
                family = line.split(" ")[2]
                if line not in families[family]:
                    families[family].append(line)
            elif found := _SAMPLE.match(line):
                name, labels, value = found[1], found[2], found[3]
                family = family if family and name.startswith(family) else name
                own = f'slipway_engine="{engine}"' + (f",{labels}" if labels else "")
                families[family].append(f"{name}{{{own}}} {value}")
    return "\n".join(line for lines in families.values() for line in lines)


def _since(now: Exposition, last: Exposition, name: str) -> Buckets | None:
    found, before = now.histogram(name), last.histogram(name)
    if found is None or before is None or before.bounds != found.bounds:
        return found
    counts = tuple(new - old for new, old in zip(found.counts, before.counts, strict=True))
    return Buckets(found.bounds, counts, found.total - before.total)


def _samples(text: str) -> Iterator[tuple[str, str, float]]:
    for line in text.splitlines():
        if not line.startswith("#") and (found := _SAMPLE.match(line)):
            yield found[1], found[2] or "", float(found[3])
