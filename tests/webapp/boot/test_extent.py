"""The suite meets every pair of values, and a nightly run every combination."""

import itertools

import pytest

from tests.plugins import extent
from tests.webapp.boot.conftest import run_pytest

AXES = ("abcde", range(4), (True, False), "xyz")
LINES = """
import pathlib, pytest
from hypothesis import given, settings, strategies
from tests.plugins.extent import combinations

@pytest.mark.parametrize(("one", "two", "three"), combinations("abc", "de", "fgh"))
def test_product(one, two, three): pass

@settings(max_examples=7)
@given(strategies.integers())
def test_property(number):
    with pathlib.Path({told!r}).open("a") as told:
        told.write("x")
"""


def test_every_two_values_of_two_axes_meet_in_fewer_cases_than_all():
    found = extent.combinations(*AXES)

    for first, second in itertools.combinations(range(len(AXES)), 2):
        met = {(row[first], row[second]) for row in found}
        assert met == set(itertools.product(AXES[first], AXES[second]))
    assert len(found) < len(list(itertools.product(*AXES))) / 4
    assert found == extent.combinations(*AXES)


def test_one_axis_is_taken_whole():
    assert extent.combinations("abc") == [("a",), ("b",), ("c",)]


@pytest.mark.parametrize(("words", "cases", "examples"), [((), 9, 7), (("--nightly",), 18, 500)])
def test_a_nightly_run_takes_all_cases_and_many_examples(tmp_path, write, words, cases, examples):
    told = tmp_path / "told.txt"
    write(LINES.format(told=str(told)))

    status, printed = run_pytest("-q", "-p", "tests.plugins.extent", *words, str(tmp_path))

    assert status == 0, printed
    assert f"{cases + 1} passed" in printed.splitlines()[-1]
    assert len(told.read_text()) == examples


def test_a_failing_example_is_printed_with_a_way_to_repeat_it(tmp_path, write):
    write("from hypothesis import given, strategies\n"
          "@given(strategies.integers())\n"
          "def test_small(number): assert number < 100\n")  # fmt: skip

    status, printed = run_pytest(
        "-q", "-p", "tests.conftest", "-p", "no:schemathesis", str(tmp_path)
    )

    assert status == 1
    assert "number=100" in printed
    assert "@reproduce_failure(" in printed
