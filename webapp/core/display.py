"""Figures in words: units, precision, intervals, plurals."""

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from django.template.loader import render_to_string
from django.utils.safestring import SafeString

from planner.specs.units import DAY, HOUR, MINUTE

# ---------------------------------------------------------------------------
# Formatting of numbers for people: value and unit, with limited significant digits.
#
# Memory is in GiB (1024-based, as tools report it), bandwidth in GB/s (1000-based, as vendors do).
# ---------------------------------------------------------------------------


THIN = "\u202f"  # narrow no-break space, between thousands
NBSP = "\u00a0"  # no-break space, between a value and its unit
MINUS = "\u2212"
DASH = "\u2013"  # en dash, between the ends of a range
TIMES = "\u00d7"
NOTHING = "\u2014"  # where there is no number
MAX_DECIMALS = 6  # smaller numbers are written with an exponent
WHOLE_DIGITS = 4  # significant digits of a whole number: more would be false precision
TWO_DIGITS = 10  # smaller numbers have one digit before the point
FINE_SECONDS, FINE_UP_TO = 15, 180  # of few minutes whole ones would be a third off
A_FEW_SECONDS = 10  # below this, a number would be false precision
NEARLY_A_MINUTE = 55  # seconds; from here on, shown as a minute


class Quantity(NamedTuple):
    """A number and its unit, both ready to show."""

    value: str
    unit: str

    def __str__(self) -> str:
        return f"{self.value}{NBSP}{self.unit}" if self.unit else self.value


def _is_real(value: float) -> bool:
    """Return whether a number is finite, also when multiplied by 1000.

    A database may return a large float as an integer that exceeds the range of floats.
    """
    try:
        return math.isfinite(float(value) * 1000)
    except OverflowError:
        return False


def number(value: float, digits: int = 3) -> str:
    """Return ``value`` with ``digits`` significant digits; integers with up to four."""
    if value == 0 or not _is_real(value):
        return "0" if value == 0 else NOTHING
    power = math.floor(math.log10(abs(value)))
    if power < -MAX_DECIMALS:
        return f"{value:.{digits - 1}e}".replace("-", MINUS)
    decimals = max(0, digits - 1 - power)
    value = round(value, decimals or min(0, WHOLE_DIGITS - 1 - power))
    if decimals and abs(value) >= 10.0 ** (power + 1):  # 9.996 became 10.0: one digit less
        decimals -= 1
    return _typeset(f"{value:,.{min(decimals, MAX_DECIMALS)}f}")


def whole(value: float) -> str:
    """Return an exact whole number with thin spaces between thousands."""
    if not _is_real(value):
        return NOTHING
    return _typeset(f"{value:,.0f}")


def _typeset(text: str) -> str:
    """Return a formatted number with thin spaces and a real minus sign; never "-0"."""
    bare = text.lstrip("-")
    is_below = text.startswith("-") and any(digit in "123456789" for digit in bare)
    return (MINUS if is_below else "") + bare.replace(",", THIN)


def _scaled(value: float, base: float, units: tuple[str, ...], digits: int = 3) -> Quantity:
    """Return ``value`` in the largest unit in which the shown number is at least one."""
    if not _is_real(value):
        return Quantity(NOTHING, units[0])
    power = 0
    while round(abs(value)) >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    return Quantity(number(value, digits) if power else whole(value), units[power])


def memory(value: float) -> Quantity:
    """Return bytes as B, KiB, MiB or GiB."""
    return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB"))


def gib(value: float) -> str:
    """Return bytes as a number of GiB with one or two decimals, for aligned columns."""
    if not _is_real(value):
        return NOTHING
    in_gib = value / 1024**3
    return _typeset(f"{in_gib:,.1f}" if abs(in_gib) >= 1 else f"{in_gib:.2f}")


def bandwidth(value: float) -> Quantity:
    """Return bytes per second as MB/s, GB/s or TB/s."""
    return _scaled(value, 1000, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def flops(value: float) -> Quantity:
    """Return FLOP per second as GFLOP/s or TFLOP/s."""
    return _scaled(value, 1000, ("FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"))


def flop(value: float) -> Quantity:
    """Return FLOP as MFLOP, GFLOP or TFLOP."""
    return _scaled(value, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def tokens_rate(value: float) -> Quantity:
    """Return a rate in tokens per second, ready to show."""
    return Quantity(number(value), "tok/s")


def tokens(value: float) -> Quantity:
    """Return a number of tokens as k, M or B tokens."""
    scaled = _scaled(value, 1000, ("", "k", "M", "B", "T"))
    return Quantity(scaled.value, f"{scaled.unit} tokens".strip())


def parameters(value: float) -> Quantity:
    """Return a parameter count as M, B or T."""
    return _scaled(value, 1000, ("", "K", "M", "B", "T"))


def share(value: float) -> Quantity:
    """Return a part of one as per cent."""
    return Quantity(number(100 * value) if _is_real(value) else NOTHING, "%")


KILO = 1000.0
LEAST_CENTS = 0.1  # US dollars, below which cents are too coarse


def money(value: float) -> Quantity:
    """Return an amount in US dollars: ``$4.95``, ``$0.0042``, ``$1 200``."""
    if not _is_real(value):
        return Quantity(NOTHING, "")
    amount = abs(value)
    if round(amount, 2) >= KILO:
        digits = whole(amount)
    else:
        digits = f"{amount:.2f}" if amount >= LEAST_CENTS or not amount else number(amount, 2)
    return Quantity(f"{MINUS if value < 0 else ''}${digits}", "")


def money_an_hour(value: float) -> str:
    """Return US dollars per hour: ``$0.74/h``."""
    return f"{money(value)}/h"


def money_for_tokens(value: float) -> Quantity:
    """Return US dollars per million tokens: ``$4.95 / 1M tokens``."""
    return Quantity(money(value).value, "/ 1M tokens")


def energy(value: float) -> Quantity:
    """Return joules as J, kJ, MJ or GJ; less than a joule as a decimal."""
    if abs(value) < 1:
        return Quantity(number(value), "J")
    return _scaled(value, 1000, ("J", "kJ", "MJ", "GJ"))


def energy_of_a_token(value: float) -> Quantity:
    """Return an energy in joules per token, ready to show."""
    return Quantity(number(value), "J/token")


def count(value: float) -> Quantity:
    """Return a count as a whole number."""
    return Quantity(whole(value), "")


def duration(value: float) -> Quantity:
    """Return seconds in a suitable unit: ms, s, min, h or days."""
    if not _is_real(value):
        return Quantity(NOTHING, "s")
    if round(value, 3) < 1:
        return Quantity(number(value * 1000, 2), "ms")
    if round(value) < MINUTE:
        return Quantity(number(value, 2), "s")
    if round(value / MINUTE) < HOUR / MINUTE:
        return Quantity(number(max(1.0, value / MINUTE), 2), "min")
    if value < 2 * DAY:
        return Quantity(number(max(1.0, value / HOUR), 2), "h")
    return Quantity(number(value / DAY, 2), "days")


def clock(value: float) -> str:
    """Return seconds as whole parts: ``2 min 5 s``, ``1 h 40 min``, ``3 days 2 h``."""
    if not _is_real(value):
        return NOTHING
    if round(value) < 0:
        return f"{MINUS}{clock(-value)}"
    seconds = round(value)
    if seconds < MINUTE:
        return f"{seconds} s"
    for size, name, small, small_name in (
        (DAY, "d", HOUR, "h"),
        (HOUR, "h", MINUTE, "min"),
        (MINUTE, "min", 1.0, "s"),
    ):
        if seconds >= size:
            rest = int(seconds % size // small)
            return f"{int(seconds // size)} {name}" + (f" {rest} {small_name}" if rest else "")
    return f"{seconds} s"


def elapsed(value: float) -> Quantity:
    """Return seconds formatted by ``clock``, which includes the units."""
    return Quantity(clock(value), "")


def coarse(value: float) -> str:
    """Return seconds as their largest whole part only: ``4 min``, ``3 d``."""
    return " ".join(clock(value).split()[:2])


def about(value: float) -> str:
    """Return seconds as a rounded estimate: ``about 13 min``, ``about 1 min 30 s``."""
    if not _is_real(value):
        return NOTHING
    if value < A_FEW_SECONDS:
        return "a few seconds"
    if value < NEARLY_A_MINUTE:
        return f"about {round(value / 5) * 5} s"
    if round(value / FINE_SECONDS) * FINE_SECONDS < FINE_UP_TO:
        return f"about {clock(max(MINUTE, round(value / FINE_SECONDS) * FINE_SECONDS))}"
    if round(value / MINUTE) < HOUR / MINUTE:
        return f"about {max(1, round(value / MINUTE))} min"
    return f"about {clock(round(value / 600) * 600)}"


def percent(value: float) -> str:
    """Return a ratio as per cent: ``5.8 %``, ``41 %``."""
    if not _is_real(value):
        return NOTHING
    scaled = value * 100
    return f"{_typeset(f'{scaled:.{_decimals_of(scaled)}f}')}{NBSP}%"


def counted(number: int, noun: str) -> str:
    """Return a number of things: ``1 device``, ``3 devices``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def signed_percent(value: float) -> str:
    """Return a change in per cent with sign, real minus and two digits: ``+4.2 %``."""
    if not _is_real(value):
        return NOTHING
    return f"{value:+.{_decimals_of(value)}f} %".replace("-", MINUS)


def _decimals_of(percent: float) -> int:
    return 1 if abs(percent) < TWO_DIGITS else 0


def deviation_words(ratio: float) -> str:
    """Return the deviation of a measured from a predicted value, in whole per cent."""
    if not _is_real(ratio):
        return "far from"
    whole = round(abs(ratio - 1) * 100)
    return f"{whole} % {'above' if ratio > 1 else 'below'}" if whole else "equal to"


# ---------------------------------------------------------------------------
# Data of page components: built by views, rendered by templates, cached as fragments.
# ---------------------------------------------------------------------------


# Cached rendering of small HTML fragments that occur many times on a page.


CACHED_FRAGMENTS = 1024  # fragments; their values are short, such as a name or a duration


@lru_cache(maxsize=CACHED_FRAGMENTS, typed=True)  # typed: a SafeString is not the key of a str
def fragment(template_name: str, **values: Hashable) -> SafeString:
    """Return a template rendered with ``values``, from the cache if possible.

    The template must depend on nothing else: not on request, time or language.
    """
    return render_to_string(template_name, values)


WHISKER_SPAN = 1.9  # the axis spans value / 1.9 to value * 1.9 at least, on a log scale
COUNTED = frozenset({"requests", "clients", "devices", "sequences"})  # whole numbers
UNIT_FORMATS = {
    "bytes": memory,
    "seconds": duration,
    "elapsed_seconds": elapsed,
    "tokens_per_second": tokens_rate,
    "tokens": tokens,
    "usd": money,
    "usd_per_million_tokens": money_for_tokens,
    "joules": energy,
    "joules_per_token": energy_of_a_token,
    "bytes_per_second": bandwidth,
    "flops_per_second": flops,
    "parameters": parameters,
    "share": share,
    "count": count,
}
# Every tensor class of the planner is drawn as one of six terms, in this order.
TERMS = (
    ("weights", "Weights", ("weights", "adapters", "reference_weights")),
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
    text = whole(value) if unit in COUNTED else number(value)
    return Quantity(text, unit)


class Span(NamedTuple):
    """Start and width of an element, in per cent of its drawing."""

    start: float
    width: float

    @property
    def end(self) -> float:
        """Return where the segment ends, in per cent of the bar's width."""
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
        return f"{start}{DASH}{high.value if has_shown_unit else high}"

    @property
    def has_whisker(self) -> bool:
        """Return whether the interval can be drawn."""
        return bool(self.low and self.high and self.value > 0 and self.low > 0)

    def _at(self, value: float) -> float:
        """Return the position of ``value`` on the logarithmic axis, in per cent; 0 below zero."""
        if value <= 0:
            return 0.0
        marks = [self.value, self.low or self.value, self.high or self.value]
        marks += [self.measured] if self.measured and self.is_comparable else []
        reach = max(abs(self._distance(mark)) for mark in marks if mark > 0) * 1.15
        span = max(reach, math.log(WHISKER_SPAN))
        return round(50 + 50 * self._distance(value) / span, 1)

    def _distance(self, mark: float) -> float:
        """Return the logarithm of a mark relative to the value; their ratio may underflow."""
        return math.log(mark) - math.log(self.value)

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
        total, capacity = memory(self.total_bytes), memory(self.capacity_bytes)
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
            words = f"{name} {memory(size)}"
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


# ---------------------------------------------------------------------------
# Text helpers: capitalise messages, list names, format actors, name operator classes.
# ---------------------------------------------------------------------------


FIRST_OF_A_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")

# Display names of the planner's operator classes, shared by several pages.


OPERATOR_WORDS = {
    "compute": "Arithmetic",
    "memory_bandwidth": "Memory traffic",
    "communication": "Communication",
    "overhead": "Overhead per step",
    "memory": "Memory use",
}


# An identifier, such as a field or a dtype: lower-case letters with an underscore, digit or dot
# inside; or a product's name with a capital inside, such as vLLM.
NAME = re.compile(r"[a-z]+(?:[0-9_A-Z]|\.\w)[\w.]*(?=[\s:,]|$)")


def capitalised(text: str) -> str:
    """Return a text with a capital first letter; a leading identifier stays unchanged.

    >>> capitalised("needs 3 GiB"), capitalised("tpot_seconds is 0.2 s")
    ('Needs 3 GiB', 'tpot_seconds is 0.2 s')
    """
    return text if NAME.match(text) else f"{text[:1].upper()}{text[1:]}"


def actor_words(actor: str) -> str:
    """Return the display name of an actor: a person, a host, or a part of the product.

    >>> actor_words("alice"), actor_words("host:node-a"), actor_words("system:allocator")
    ('alice', 'host node-a', 'Slipway (allocator)')
    """
    kind, _, name = actor.partition(":")
    if not name:
        return actor
    return {"host": f"host {name}", "system": f"Slipway ({name})"}.get(kind, actor)


def listed(names: Sequence[str]) -> str:
    """Return names as an enumeration.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    *most, last = names or [""]
    return f"{', '.join(most)} and {last}" if most else last


def sentence(text: str) -> str:
    """Return a message as a complete sentence.

    >>> sentence("the model is unknown")
    'The model is unknown.'
    """
    return f"{capitalised(text.rstrip('.'))}."


def cell(text: str) -> str:
    """Return a text that spreadsheets do not interpret as a formula."""
    return f"'{text}" if text.lstrip(" ").startswith(FIRST_OF_A_FORMULA) else text
