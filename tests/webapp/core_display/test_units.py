"""Numbers as people read them."""

import pytest

from webapp.core import units
from webapp.core.units import NBSP, THIN

GIB = 1024**3


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0 B"),
        (900, "900 B"),
        (6.8 * 1024**2, "6.80 MiB"),
        (21 * GIB, "21.0 GiB"),
        (208.4 * GIB, "208 GiB"),
    ],
)
def test_memory_is_said_in_its_largest_fitting_unit(value, words):
    assert str(units.memory(value)) == words.replace(" ", NBSP)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0312, "31 ms"),
        (0.62, "620 ms"),
        (2.04, "2.0 s"),
        (780, "13 min"),
        (7200, "2.0 h"),
        (200_000, "2.3 days"),
    ],
)
def test_a_duration_is_said_in_one_unit(value, words):
    assert str(units.duration(value)) == words.replace(" ", NBSP)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3, "a few seconds"),
        (33, "about 35 s"),
        (780, "about 13 min"),
        (6100, "about 1 h 40 min"),
    ],
)
def test_an_estimate_of_time_has_no_false_precision(value, words):
    assert units.about(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(42, "42 s"), (125, "2 min 5 s"), (6000, "1 h 40 min"), (3600, "1 h"), (90_000, "1 d 1 h")],
)
def test_a_length_of_time_is_said_in_whole_parts(value, words):
    assert units.clock(value) == words


def test_how_long_ago_needs_one_part_only():
    assert units.coarse(289) == "4 min"


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0"), (0.98214, "0.982"), (31, "31.0"), (2614.4, "2 614"), (313_698, "313 700")],
)
def test_a_number_has_as_many_digits_as_it_is_worth(value, words):
    assert units.number(value) == words.replace(" ", THIN)


def test_a_negative_number_has_a_real_minus():
    assert units.number(-2.5) == "\u22122.50"


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_no_number_is_a_dash(value):
    assert units.number(value) == "—"


@pytest.mark.parametrize(("value", "words"), [(0.058, "5.8"), (0.412, "41"), (1.0, "100")])
def test_a_ratio_is_said_in_per_cent(value, words):
    assert units.percent(value) == f"{words}{NBSP}%"


def test_a_parameter_count_is_said_as_people_say_it():
    assert str(units.parameters(8_030_261_248)) == f"8.03{NBSP}B"


def test_a_whole_number_keeps_every_digit():
    assert units.whole(131_072) == f"131{THIN}072"
