"""Ratios of runs in turns: their mean, and what they bound."""

import pytest

from runners.jobs.ratios import ratio_of, seconds_in_turns


def test_every_way_runs_once_a_round_and_once_before():
    calls = []

    taken = seconds_in_turns([lambda: calls.append("a"), lambda: calls.append("b")], 4)

    assert [len(each) for each in taken] == [4, 4]
    assert sorted(calls) == ["a"] * 5 + ["b"] * 5


def test_every_other_round_goes_backwards():
    calls = []

    seconds_in_turns([lambda: calls.append("a"), lambda: calls.append("b")], 3)

    assert "".join(calls) == "baabbaab"


def test_the_ratio_is_the_geometric_mean_of_the_rounds():
    found = ratio_of("old / new", [4.0, 1.0], [1.0, 1.0])

    assert found.value == pytest.approx(2.0)
    assert (found.n, found.of) == (2, "processor seconds")


def test_rounds_that_agree_bound_it_closely():
    found = ratio_of("old / new", [2.0, 2.02, 1.98], [1.0, 1.0, 1.0])

    assert 1.9 < found.low < found.value < found.high < 2.1


def test_rounds_that_disagree_leave_one_within():
    found = ratio_of("old / new", [3.0, 0.5, 2.0], [1.0, 1.0, 1.0])

    assert found.low < 1 < found.high


def test_one_round_bounds_nothing():
    found = ratio_of("old / new", [2.0], [1.0])

    assert found.value == pytest.approx(2.0)
    assert found.low < 1e-6
