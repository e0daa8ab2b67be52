"""Data of page components: built by views, rendered by templates, cached as fragments."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from django.template.loader import render_to_string
from django.utils.safestring import SafeString

from webapp.core import units
from webapp.core.units import Quantity

# Cached rendering of small HTML fragments that occur many times on a page.


KEPT = 1024  # fragments; their values are short, such as a name or a duration


@lru_cache(maxsize=KEPT, typed=True)  # typed: a SafeString is a different key than an equal str
def fragment(template_name: str, **values: Hashable) -> SafeString:
    """Return a template rendered with ``values``, from the cache if possible.

    The template must depend on nothing else: not on request, time or language.
    """
    return render_to_string(template_name, values)


WHISKER_SPAN = 1.9  # the axis spans value / 1.9 to value * 1.9 at least, on a log scale
COUNTED = frozenset({"people", "devices", "sequences"})  # whole numbers
UNIT_FORMATS = {
    "bytes": units.memory,
    "seconds": units.duration,
    "elapsed_seconds": units.elapsed,
    "tokens_per_second": units.tokens_rate,
    "tokens": units.tokens,
    "usd": units.money,
    "$/M tok": units.money_for_tokens,
    "joules": units.energy,
    "joules_per_token": units.energy_of_a_token,
    "bytes_per_second": units.bandwidth,
    "flops_per_second": units.flops,
    "parameters": units.parameters,
    "share": units.share,
    "count": units.count,
}
# Every tensor class of the planner is drawn as one of six terms, in this order.
TERMS = (
    ("weights", "Weights", ("weights", "adapters")),
    ("kv-cache", "KV cache", ("kv_cache",)),
    ("activations", "Activations", ("activations",)),
    ("gradients", "Gradients", ("gradients",)),
    ("optimizer", "Optimiser", ("optimizer_states",)),
    ("overhead", "Overhead", ("buffers", "runtime_overhead")),
)


def quantity(value: float, unit: str) -> Quantity:
    """Return ``value`` in base units ready to show; an unknown unit is shown unchanged."""
    form = UNIT_FORMATS.get(unit)
    if form:
        return form(value)
    text = units.whole(value) if unit in COUNTED else units.number(value)
    return Quantity(text, unit)


class Span(NamedTuple):
    """Start and width of an element, in per cent of its drawing."""

    start: float
    width: float

    @property
    def end(self) -> float:
        """Return the end in per cent."""
        return self.start + self.width


@dataclass(frozen=True)
class Figure:
    """One number with unit, 80 % interval, provenance and measured value."""

    label: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    provenance: str = "modelled"  # modelled, published or measured
    note: str = ""
    href: str = ""
    evidence: str = ""  # URL of the measurements behind the figure's error class
    measured: float | None = None
    is_comparable: bool = True  # whether the measured value is drawn on the interval's axis

    @property
    def shown(self) -> Quantity:
        """Return the measured value if there is one, else the predicted value."""
        return quantity(self.value if self.measured is None else self.measured, self.unit)

    @property
    def interval_words(self) -> str:
        """Return the interval as its two ends, or ""."""
        if self.low is None or self.high is None:
            return ""
        low, high = quantity(self.low, self.unit), quantity(self.high, self.unit)
        start = low.value if low.unit == high.unit else str(low)
        has_shown_unit = low.unit == high.unit == self.shown.unit
        return f"{start}{units.DASH}{high.value if has_shown_unit else high}"

    @property
    def has_whisker(self) -> bool:
        """Return whether the interval can be drawn."""
        return bool(self.low and self.high and self.value > 0 and self.low > 0)

    def _at(self, value: float) -> float:
        """Return the position of ``value`` on the axis, in per cent."""
        marks = [self.value, self.low or self.value, self.high or self.value]
        marks += [self.measured] if self.measured and self.is_comparable else []
        reach = max(abs(math.log(mark / self.value)) for mark in marks) * 1.15
        span = max(reach, math.log(WHISKER_SPAN))
        return round(50 + 50 * math.log(value / self.value) / span, 1)

    @property
    def band(self) -> Span:
        """Return the interval's span on the axis."""
        low = self._at(self.low or self.value)
        return Span(low, round(self._at(self.high or self.value) - low, 1))

    @property
    def mid(self) -> float:
        """Return the prediction's position on the axis."""
        return self._at(self.value)

    @property
    def dot(self) -> float | None:
        """Return the measured value's position on the axis, or None."""
        return self._at(self.measured) if self.measured and self.is_comparable else None


class Segment(NamedTuple):
    """One term of a memory bar."""

    term: str
    name: str
    span: Span
    words: str
    size: float


@dataclass(frozen=True)
class MemoryRow:
    """Memory bar of one device or pipeline stage: its terms and its capacity."""

    label: str
    segments: tuple[Segment, ...]
    total_bytes: float
    capacity_bytes: float
    needle: float | None = None  # measured peak, in per cent of the bar

    @property
    def capacity(self) -> float:
        """Return the capacity's position in per cent; 100 if everything fits."""
        return round(100 * min(1.0, self.capacity_bytes / max(self.total_bytes, 1.0)), 2)

    @property
    def is_over(self) -> bool:
        """Return whether the total exceeds the capacity."""
        return self.total_bytes > self.capacity_bytes

    @property
    def words(self) -> str:
        """Return ``21.0 / 23.1 GiB``."""
        total, capacity = units.memory(self.total_bytes), units.memory(self.capacity_bytes)
        start = total.value if total.unit == capacity.unit else str(total)
        return f"{start} / {capacity}"


def memory_row(
    label: str,
    breakdown: Mapping[str, float],
    capacity_bytes: float,
    measured_bytes: float | None = None,
) -> MemoryRow:
    """Return the memory bar of one device from bytes per tensor class."""
    total = float(sum(breakdown.values()))
    full = max(total, capacity_bytes, 1.0)
    segments, start = [], 0.0
    for term, name, classes in TERMS:
        size = sum(breakdown.get(part, 0.0) for part in classes)
        if size > 0:
            width = 100 * size / full
            words = f"{name} {units.memory(size)}"
            segments.append(
                Segment(term, name, Span(round(start, 2), round(width, 2)), words, size)
            )
            start += width
    needle = round(100 * measured_bytes / full, 2) if measured_bytes else None
    return MemoryRow(label, tuple(segments), total, capacity_bytes, needle)


def legend(rows: Sequence[MemoryRow]) -> list[Segment]:
    """Return one segment per term that occurs in ``rows``, in fixed order."""
    by_term = {segment.term: segment for row in rows for segment in row.segments}
    return [by_term[term] for term, _, _ in TERMS if term in by_term]
