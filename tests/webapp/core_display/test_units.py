"""Numbers as people read them, above all where rounding takes them into the next unit."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from webapp.core import display
from webapp.core.display import NBSP, THIN, UNIT_FORMATS, quantity

KIB, MIB, GIB = 1024, 1024**2, 1024**3
HOUR, DAY = 3600, 86_400
POSITIVE = st.floats(1e-5, 1e18)
UNSEEN = [math.nan, math.inf, -math.inf]


def spaced(words: str) -> str:
    return words.replace("_", THIN).replace(" ", NBSP)


def misread(form, *rows) -> list[tuple]:
    """The values of (value, words) that a form says in other words."""
    return [(value, got, words) for value, words in rows if (got := str(form(value))) != words]


def test_memory_changes_its_unit_where_its_digits_do():
    rows = [
        (0, "0 B"),
        (1, "1 B"),
        (900, "900 B"),
        (1023, "1_023 B"),
        (1023.7, "1.00 KiB"),
        (KIB, "1.00 KiB"),
        (1023.2 * KIB, "1_023 KiB"),
        (1023.9 * KIB, "1.00 MiB"),
        (6.8 * MIB, "6.80 MiB"),
        (9.996 * MIB, "10.0 MiB"),
        (99.96 * MIB, "100 MiB"),
        (1023.9 * MIB, "1.00 GiB"),
        (80 * GIB, "80.0 GiB"),
        (15.7487 * GIB, "15.7 GiB"),
        (21 * GIB, "21.0 GiB"),
        (208.4 * GIB, "208 GiB"),
        (2048 * GIB, "2_048 GiB"),
        (-3 * GIB, "\u22123.00 GiB"),
    ]
    rows = [(value, spaced(words).replace(THIN, "")) for value, words in rows]
    wrong = misread(lambda value: str(display.memory(value)).replace(THIN, ""), *rows)
    assert not wrong, wrong


def test_a_length_of_time_is_said_in_the_unit_where_its_digits_belong():
    durations = [
        (0, "0 ms"),
        (8e-6, "0.0080 ms"),
        (0.0004, "0.40 ms"),
        (0.0312, "31 ms"),
        (0.62, "620 ms"),
        (0.9994, "999 ms"),
        (0.9999, "1.0 s"),
        (1, "1.0 s"),
        (2.04, "2.0 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.7, "1.0 min"),
        (60, "1.0 min"),
        (61, "1.0 min"),
        (780, "13 min"),
        (3540, "59 min"),
        (3599, "1.0 h"),
        (HOUR, "1.0 h"),
        (2 * HOUR, "2.0 h"),
        (DAY, "24 h"),
        (47.9 * HOUR, "48 h"),
        (2 * DAY, "2.0 days"),
        (200_000, "2.3 days"),
        (400 * DAY, "400 days"),
    ]
    clocks = [
        (0, "0 s"),
        (0.4, "0 s"),
        (42, "42 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (119.6, "2 min"),
        (125, "2 min 5 s"),
        (3599, "59 min 59 s"),
        (HOUR, "1 h"),
        (3661, "1 h 1 min"),
        (6000, "1 h 40 min"),
        (86_399, "23 h 59 min"),
        (86_399.7, "1 d"),
        (90_000, "1 d 1 h"),
        (10 * DAY + 3 * HOUR, "10 d 3 h"),
    ]
    estimates = [
        (0, "a few seconds"),
        (3, "a few seconds"),
        (9.9, "a few seconds"),
        (10, "about 10 s"),
        (33, "about 35 s"),
        (54, "about 55 s"),
        (55, "about 1 min"),
        (66, "about 1 min"),
        (89, "about 1 min 30 s"),
        (171, "about 2 min 45 s"),
        (200, "about 3 min"),
        (780, "about 13 min"),
        (3540, "about 59 min"),
        (3590, "about 1 h"),
        (HOUR, "about 1 h"),
        (6100, "about 1 h 40 min"),
        (86_300, "about 1 d"),
        (200_000, "about 2 d 7 h"),
    ]
    coarse = [(30, "30 s"), (61, "1 min"), (289, "4 min"), (7300, "2 h"), (90_000, "1 d")]
    wrong = misread(display.duration, *((value, spaced(words)) for value, words in durations))
    wrong += misread(display.clock, *clocks) + misread(display.about, *estimates)
    wrong += misread(display.coarse, *coarse)
    assert not wrong, wrong


def test_a_number_is_rounded_once_to_as_many_digits_as_it_is_worth():
    rows = [
        (9.996, 3, "10.0"),
        (99.96, 3, "100"),
        (0.99996, 3, "1.00"),
        (0.0999996, 3, "0.100"),
        (15.7487, 3, "15.7"),
        (0.00167, 3, "0.00167"),
        (1.2e-9, 2, "1.2e\u221209"),
        (-0.5, 2, "\u22120.50"),
        (12_346, 3, "12_350"),
        (134.515, 3, "135"),
        (999_960, 3, "1_000_000"),
        (1e6, 3, "1_000_000"),
        (1234.4, 2, "1_234"),
    ]
    wrong = [
        (value, got, words)
        for value, digits, words in rows
        if (got := display.number(value, digits)) != spaced(words)
    ]
    usual = [(0, "0"), (0.98214, "0.982"), (31, "31.0"), (-2.5, "\u22122.50")]
    usual += [(2614.4, f"2{THIN}614"), (313_698, f"313{THIN}700")]
    wrong += misread(display.number, *usual)
    assert not wrong, wrong


def test_each_kind_of_figure_has_its_own_unit():
    rows = [
        (display.bandwidth, 12e9, "12.0 GB/s"),
        (display.bandwidth, 999.9e6, "1.00 GB/s"),
        (display.bandwidth, 3.35e12, "3.35 TB/s"),
        (display.bandwidth, 20e15, "20_000 TB/s"),
        (display.flops, 989e12, "989 TFLOP/s"),
        (display.flops, 1.5e16, "15.0 PFLOP/s"),
        (display.flops, 30e9, "30.0 GFLOP/s"),
        (display.flop, 6.2e9, "6.20 GFLOP"),
        (display.tokens_rate, 0.0207, "0.0207 tok/s"),
        (display.tokens_rate, 13_204, "13_200 tok/s"),
        (display.tokens, 12, "12 tokens"),
        (display.tokens, 260_040, "260 k tokens"),
        (display.tokens, 15e12, "15.0 T tokens"),
        (display.parameters, 134_515_008, "135 M"),
        (display.parameters, 999_999_999, "1.00 B"),
        (display.parameters, 8_030_261_248, "8.03 B"),
        (display.parameters, 405_853_388_800, "406 B"),
        (display.parameters, 12, "12"),
        (display.money, 0.465, "$0.47"),
        (display.money, 2.59, "$2.59"),
        (display.money, 0.0042, "$0.0042"),
        (display.money, 0.0, "$0.00"),
        (display.money, 1234.4, "$1_234"),
        (display.money, 999.996, "$1_000"),
        (display.money, -2.5, "\N{MINUS SIGN}$2.50"),
        (display.money_for_tokens, 4.95, "$4.95 / 1M tokens"),
    ]
    wrong = [
        (value, got, words)
        for form, value, words in rows
        if (got := spaced(str(form(value)))) != spaced(words)
    ]
    assert not wrong, wrong
    assert str(display.parameters(8_030_261_248)) == f"8.03{NBSP}B"


def test_a_column_of_gib_lines_up_and_a_whole_number_keeps_every_digit():
    rows = [(0, "0.00"), (GIB // 2, "0.50"), (GIB, "1.0"), (23.9 * GIB, "23.9")]
    wrong = misread(display.gib, *rows, (2000 * GIB, f"2{THIN}000.0"))
    wrong += misread(display.whole, (131_072, f"131{THIN}072"))
    assert not wrong, wrong


def test_a_ratio_in_per_cent_keeps_a_decimal_below_ten():
    rows = [
        (0, "0.0 %"),
        (-0.031, "\u22123.1 %"),
        (0.058, "5.8 %"),
        (0.0999, "10.0 %"),
        (0.1, "10 %"),
        (0.412, "41 %"),
        (1.0, "100 %"),
        (2.5, "250 %"),
    ]
    wrong = misread(display.percent, *((value, spaced(words)) for value, words in rows))
    assert not wrong, wrong


def test_what_is_no_number_is_a_dash_in_every_unit_and_form():
    forms = [
        display.clock,
        display.coarse,
        display.about,
        display.gib,
        display.whole,
        display.percent,
    ]
    forms += [display.number, lambda value: display.memory(value).value]
    wrong = [
        (value, unit)
        for value, unit in itertools.product(UNSEEN, UNIT_FORMATS)
        if quantity(value, unit).value != "\u2014"
    ]
    wrong += [
        (value, form)
        for value, form in itertools.product(UNSEEN, forms)
        if form(value) != display.NOTHING
    ]
    assert not wrong, wrong
    assert display.NOTHING == "\u2014"


def test_an_unknown_unit_is_shown_as_it_is_and_none_leaves_no_space():
    assert str(quantity(2.5, "apples")) == f"2.50{NBSP}apples"
    assert str(quantity(61.5, "")) == "61.5"


def test_below_zero_has_a_true_minus_and_a_little_below_it_none():
    for shown, words in (
        (display.gib(-3 * GIB), "\u22123.0"),
        (display.gib(-GIB / 4), "\u22120.25"),
        (display.whole(-1234.0), f"\u22121{THIN}234"),
        (display.memory(-12).value, "\u221212"),
        (display.clock(-65), "\u22121 min 5 s"),
        (display.percent(-0.04), f"\u22124.0{NBSP}%"),
    ):
        assert shown == words
    for form in (display.whole, display.gib, display.percent):
        assert form(-1e-9) == form(0.0), form


def as_number(text: str) -> float:
    return float(text.replace(THIN, "").replace("\u2212", "-"))


@given(POSITIVE)
def test_a_number_is_never_off_by_more_than_its_last_digit(value):
    assert as_number(display.number(value)) == pytest.approx(value, rel=0.006, abs=6e-7)


@given(POSITIVE)
def test_more_digits_never_say_less(value):
    few, many = (abs(as_number(display.number(value, n)) - value) for n in (2, 4))
    assert many <= few + 1e-12 * value


@given(POSITIVE, st.floats(1.02, 1e3))
def test_a_larger_number_never_reads_smaller(value, factor):
    assert as_number(display.number(value)) <= as_number(display.number(value * factor))


@given(st.floats(0, 1e15))
def test_memory_never_reads_as_a_thousand_and_more_below_the_largest_unit(value):
    shown = display.memory(value)
    assert shown.unit == "GiB" or as_number(shown.value) < 1024


@given(st.floats(0, 1e9))
def test_no_duration_reads_as_sixty_seconds_or_minutes(value):
    shown = display.duration(value)
    assert shown.unit not in {"s", "min"} or as_number(shown.value) < 60


@given(st.integers(0, 10**7))
def test_a_length_of_time_says_its_largest_part_truly(seconds):
    number, unit = display.clock(seconds).split()[:2]
    size = {"s": 1, "min": 60, "h": 3600, "d": 86_400}[unit]
    assert int(number) == seconds // size


@given(st.integers(0, 10**15))
def test_a_whole_number_keeps_all_its_digits(value):
    assert as_number(display.whole(value)) == value


@given(st.floats(-1e18, 1e18))
def test_no_form_prints_an_ascii_minus(value):
    assert not any("-" in form(value) for form in (display.gib, display.whole, display.percent))
