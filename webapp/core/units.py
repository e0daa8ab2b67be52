"""Formatting of numbers for people: value and unit, with limited significant digits.

Memory is in GiB (1024-based, as tools report it), bandwidth in GB/s (1000-based, as vendors do).
"""

import math
from typing import NamedTuple

THIN = "\u202f"  # narrow no-break space, between thousands
NBSP = "\u00a0"  # no-break space, between a value and its unit
MINUS = "\u2212"
DASH = "\u2013"  # en dash, between the ends of a range
TIMES = "\u00d7"
NOTHING = "\u2014"  # where there is no number
MAX_DECIMALS = 6  # smaller numbers are written with an exponent
WHOLE_DIGITS = 4  # significant digits of a whole number: more would be false precision
TWO_DIGITS = 10  # smaller numbers have one digit before the point
A_FEW_SECONDS = 10  # below this, a number would be false precision
NEARLY_A_MINUTE = 55  # seconds; from here on, shown as a minute
MINUTE = 60.0
HOUR = 3600.0
DAY = 86400.0


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
    """Return tokens per second."""
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


def money(value: float) -> Quantity:
    """Return US dollars."""
    return Quantity(number(value, 2 if value < 1 else 3), "$")


def money_for_tokens(value: float) -> Quantity:
    """Return US dollars per million tokens, with the digits of ``money``."""
    return Quantity(money(value).value, "$/M tok")


def energy(value: float) -> Quantity:
    """Return joules as J, kJ, MJ or GJ; less than a joule as a decimal."""
    if abs(value) < 1:
        return Quantity(number(value), "J")
    return _scaled(value, 1000, ("J", "kJ", "MJ", "GJ"))


def energy_of_a_token(value: float) -> Quantity:
    """Return joules per token."""
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
    """Return seconds as a rounded estimate: ``about 13 min``."""
    if not _is_real(value):
        return NOTHING
    if value < A_FEW_SECONDS:
        return "a few seconds"
    if value < NEARLY_A_MINUTE:
        return f"about {round(value / 5) * 5} s"
    if round(value / MINUTE) < HOUR / MINUTE:
        return f"about {max(1, round(value / MINUTE))} min"
    return f"about {clock(round(value / 600) * 600)}"


def percent(value: float) -> str:
    """Return a ratio as per cent: ``5.8 %``, ``41 %``."""
    if not _is_real(value):
        return NOTHING
    scaled = value * 100
    return f"{_typeset(f'{scaled:.{_decimals_of(scaled)}f}')}{NBSP}%"


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
