"""Numbers at the borders between units, where rounding changes the unit."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from webapp.core import units
from webapp.core.display import UNIT_FORMATS, quantity
from webapp.core.units import NBSP, THIN

KIB, MIB, GIB = 1024, 1024**2, 1024**3
POSITIVE = st.floats(1e-5, 1e18)


def spaced(words: str) -> str:
    return words.replace("_", THIN).replace(" ", NBSP)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1, "1 B"),
        (1023, "1_023 B"),
        (1023.7, "1.00 KiB"),
        (KIB, "1.00 KiB"),
        (1023.2 * KIB, "1_023 KiB"),
        (1023.9 * KIB, "1.00 MiB"),
        (9.996 * MIB, "10.0 MiB"),
        (99.96 * MIB, "100 MiB"),
        (1023.9 * MIB, "1.00 GiB"),
        (80 * GIB, "80.0 GiB"),
        (15.7487 * GIB, "15.7 GiB"),
        (2048 * GIB, "2_048 GiB"),
        (-3 * GIB, "\u22123.00 GiB"),
    ],
)
def test_memory_changes_its_unit_where_its_digits_do(value, words):
    shown = str(units.memory(value))

    assert shown.replace(THIN, "") == spaced(words).replace(THIN, "")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0 ms"),
        (8e-6, "0.0080 ms"),
        (0.0004, "0.40 ms"),
        (0.9994, "999 ms"),
        (0.9999, "1.0 s"),
        (1, "1.0 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.7, "1.0 min"),
        (60, "1.0 min"),
        (61, "1.0 min"),
        (3540, "59 min"),
        (3599, "1.0 h"),
        (3600, "1.0 h"),
        (86_400, "24 h"),
        (47.9 * 3600, "48 h"),
        (2 * 86_400, "2.0 days"),
        (400 * 86_400, "400 days"),
    ],
)
def test_a_duration_changes_its_unit_where_its_digits_do(value, words):
    assert str(units.duration(value)) == spaced(words)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (119.6, "2 min"),
        (3599, "59 min 59 s"),
        (3661, "1 h 1 min"),
        (86_399, "23 h 59 min"),
        (86_399.7, "1 d"),
        (10 * 86_400 + 3 * 3600, "10 d 3 h"),
    ],
)
def test_a_length_of_time_never_has_sixty_of_anything(value, words):
    assert units.clock(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "a few seconds"),
        (9.9, "a few seconds"),
        (10, "about 10 s"),
        (54, "about 55 s"),
        (55, "about 1 min"),
        (89, "about 1 min"),
        (3540, "about 59 min"),
        (3590, "about 1 h"),
        (3600, "about 1 h"),
        (86_300, "about 1 d"),
        (200_000, "about 2 d 7 h"),
    ],
)
def test_an_estimate_rounds_into_the_next_unit(value, words):
    assert units.about(value) == words


@pytest.mark.parametrize(
    ("value", "digits", "words"),
    [
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
    ],
)
def test_a_number_is_rounded_once(value, digits, words):
    assert units.number(value, digits) == spaced(words)


@pytest.mark.parametrize(
    ("form", "value", "words"),
    [
        (units.bandwidth, 12e9, "12.0 GB/s"),
        (units.bandwidth, 999.9e6, "1.00 GB/s"),
        (units.bandwidth, 3.35e12, "3.35 TB/s"),
        (units.bandwidth, 20e15, "20_000 TB/s"),
        (units.flops, 989e12, "989 TFLOP/s"),
        (units.flops, 1.5e16, "15.0 PFLOP/s"),
        (units.flops, 30e9, "30.0 GFLOP/s"),
        (units.flop, 6.2e9, "6.20 GFLOP"),
        (units.tokens_rate, 0.0207, "0.0207 tok/s"),
        (units.tokens_rate, 13_204, "13_200 tok/s"),
        (units.tokens, 12, "12 tokens"),
        (units.tokens, 260_040, "260 k tokens"),
        (units.tokens, 15e12, "15.0 T tokens"),
        (units.parameters, 134_515_008, "135 M"),
        (units.parameters, 999_999_999, "1.00 B"),
        (units.parameters, 405_853_388_800, "406 B"),
        (units.parameters, 12, "12"),
        (units.money, 0.465, "0.47 $"),
        (units.money, 2.59, "2.59 $"),
    ],
)
def test_each_kind_of_figure_has_its_own_unit(form, value, words):
    assert spaced(str(form(value))) == spaced(words)


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0.00"), (GIB // 2, "0.50"), (GIB, "1.0"), (23.9 * GIB, "23.9"), (2000 * GIB, "2_000.0")],
)
def test_a_column_of_gib_lines_up(value, words):
    assert units.gib(value) == spaced(words)


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0.0 %"), (-0.031, "\u22123.1 %"), (0.0999, "10.0 %"), (0.1, "10 %"), (2.5, "250 %")],
)
def test_a_ratio_below_ten_per_cent_keeps_a_decimal(value, words):
    assert units.percent(value) == spaced(words)


@pytest.mark.parametrize(
    ("value", "words"), [(30, "30 s"), (61, "1 min"), (7300, "2 h"), (90_000, "1 d")]
)
def test_how_long_ago_is_said_in_its_largest_part(value, words):
    assert units.coarse(value) == words


@pytest.mark.parametrize("unit", sorted(UNIT_FORMATS))
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_is_a_dash_in_every_unit(unit, value):
    assert quantity(value, unit).value == "\u2014"


def test_an_unknown_unit_is_shown_as_it_is():
    assert str(quantity(2.5, "apples")) == f"2.50{NBSP}apples"


def test_a_number_without_unit_has_no_space_after_it():
    assert str(quantity(61.5, "")) == "61.5"


def as_number(text: str) -> float:
    return float(text.replace(THIN, "").replace("\u2212", "-"))


@given(POSITIVE)
def test_a_number_is_never_off_by_more_than_its_last_digit(value):
    assert as_number(units.number(value)) == pytest.approx(value, rel=0.006, abs=6e-7)


@given(POSITIVE)
def test_more_digits_never_say_less(value):
    few, many = (abs(as_number(units.number(value, n)) - value) for n in (2, 4))

    assert many <= few + 1e-12 * value


@given(POSITIVE, st.floats(1.02, 1e3))
def test_a_larger_number_never_reads_smaller(value, factor):
    assert as_number(units.number(value)) <= as_number(units.number(value * factor))


@given(st.floats(0, 1e15))
def test_memory_never_reads_as_a_thousand_and_more_below_the_largest_unit(value):
    shown = units.memory(value)

    assert shown.unit == "GiB" or as_number(shown.value) < 1024


@given(st.floats(0, 1e9))
def test_no_duration_reads_as_sixty_seconds_or_minutes(value):
    shown = units.duration(value)

    assert shown.unit not in {"s", "min"} or as_number(shown.value) < 60


@given(st.integers(0, 10**7))
def test_a_length_of_time_says_its_largest_part_truly(seconds):
    number, unit = units.clock(seconds).split()[:2]
    size = {"s": 1, "min": 60, "h": 3600, "d": 86_400}[unit]

    assert int(number) == seconds // size


@given(st.integers(0, 10**15))
def test_a_whole_number_keeps_all_its_digits(value):
    assert as_number(units.whole(value)) == value


WORDS = [units.clock, units.coarse, units.about, units.gib, units.whole, units.percent]
WORDS += [units.number, lambda value: units.memory(value).value]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("words", WORDS)
def test_what_is_no_number_reads_as_nothing(words, value):
    assert words(value) == units.NOTHING


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        (units.gib(-3 * GIB), "\u22123.0"),
        (units.gib(-GIB / 4), "\u22120.25"),
        (units.whole(-1234.0), f"\u22121{THIN}234"),
        (units.memory(-12).value, "\u221212"),
        (units.clock(-65), "\u22121 min 5 s"),
        (units.percent(-0.04), f"\u22124.0{NBSP}%"),
    ],
)
def test_below_zero_has_a_true_minus(shown, words):
    assert shown == words


@pytest.mark.parametrize("form", [units.whole, units.gib, units.percent])
def test_a_little_below_zero_is_no_minus_zero(form):
    assert form(-1e-9) == form(0.0)


@given(st.floats(-1e18, 1e18))
def test_no_form_prints_an_ascii_minus(value):
    assert not any("-" in form(value) for form in (units.gib, units.whole, units.percent))
