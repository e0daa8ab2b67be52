"""How errors of rows left out become a few figures: counted by hand, on rows made by hand."""

import csv
import io
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.fitting.decode_fitting import spread_of as spread_of_errors
from planner.fitting.factors import rounded, spreads
from planner.fitting.held_out import coverage, groups_of, rightness, summary, title_of
from planner.fitting.left_out import (
    PEAK,
    STEP,
    TPOT,
    TTFT,
    Z_80,
    LeftOut,
    alike,
    spread_of,
    written,
)
from planner.fitting.serving.factors import SEEN, UNSEEN, spread

RATIOS = st.floats(0.05, 20.0)


def row(ratio, *, figure=STEP, error_class=SEEN, engine="one", part="a", measured=2.0):
    return LeftOut(figure, error_class, "r", engine, "s", part, measured, ratio * measured)


def test_a_summary_of_ten_errors_has_their_mean_median_and_ninetieth_percentile():
    errors = [0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8, 0.9, -1.0]

    found = summary(errors)

    # Between the ninth and the tenth of ten sorted values: 0.9 + 0.1 x (1.0 - 0.9).
    assert found == {"n": 10, "mean": 0.55, "median": 0.55, "p90": 0.91}


@settings(max_examples=60, deadline=None)
@given(errors=st.lists(st.floats(-1, 5), min_size=1, max_size=20))
def test_the_sign_of_an_error_is_not_part_of_its_summary(errors):
    assert summary(errors) == summary([-error for error in errors])


def test_three_right_verdicts_of_four_are_three_quarters():
    found = rightness([(True, True), (True, True), (False, True), (False, False)])

    assert (found["n"], found["right"]) == (4, 0.75)


def test_the_costly_wrong_verdict_is_counted_apart_from_the_cheap_one():
    found = rightness([(True, False), (True, False), (False, True)])

    assert (found["said_fits_ran_out"], found["refused_ran"]) == (2, 1)


@pytest.mark.parametrize(
    ("figure", "error_class", "words"),
    [
        (STEP, SEEN, "training step, unseen model"),
        (PEAK, UNSEEN, "training peak, unseen source"),
        (TPOT, SEEN, "time per output token, unseen sweep"),
        (TTFT, UNSEEN, "time to first token, unseen pair"),
    ],
)
def test_a_title_says_which_part_the_fit_never_saw(figure, error_class, words):
    assert title_of(row(1.0, figure=figure, error_class=error_class)) == words


def test_rows_of_one_figure_and_one_class_are_reported_together():
    rows = [row(1.0), row(2.0, figure=PEAK), row(3.0), row(4.0, error_class=UNSEEN)]

    assert [len(group) for group in groups_of(rows).values()] == [2, 1, 1]


@settings(max_examples=60, deadline=None)
@given(ratios=st.lists(RATIOS, min_size=5, max_size=30))
def test_at_least_four_of_five_rows_lie_within_a_spread(ratios):
    """The quantile lies between two rows, so that at most one row less than 80 % is inside."""
    rows = [row(ratio) for ratio in ratios]

    reach = Z_80 * spread_of(rows) * (1 + 1e-9)

    inside = sum(abs(math.log(ratio)) <= reach for ratio in ratios)
    assert inside >= math.floor(0.8 * (len(ratios) - 1)) + 1


@settings(max_examples=40, deadline=None)
@given(ratios=st.lists(RATIOS, min_size=2, max_size=12))
def test_a_spread_is_the_same_for_rows_that_are_off_the_other_way(ratios):
    there = spread_of([row(ratio) for ratio in ratios])
    back = spread_of([row(1 / ratio) for ratio in ratios])

    assert there == pytest.approx(back)


@settings(max_examples=40, deadline=None)
@given(ratios=st.lists(RATIOS, min_size=2, max_size=12))
def test_training_serving_and_streams_know_one_spread(ratios):
    errors = [ratio - 1 for ratio in ratios]
    expected = spread_of([row(ratio) for ratio in ratios])

    assert spread(np.array(errors)) == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert spread_of_errors(errors) == pytest.approx(expected, rel=1e-2, abs=1e-6)


@pytest.mark.parametrize(("own", "taken"), [(9, 29), (10, 10), (11, 11)])
def test_ten_rows_of_its_own_are_enough_for_an_engine(own, taken):
    mine = [row(1.1)] * own
    others = [row(1.2, engine="two")] * 20

    assert len(alike(mine[0], [*mine, *others])) == taken


def test_an_unseen_source_takes_its_width_from_all_engines():
    mine = [row(1.1, error_class=UNSEEN)] * 50
    others = [row(3.0, error_class=UNSEEN, engine="two")] * 50

    assert len(alike(mine[0], [*mine, *others])) == 100
    found = spreads([*mine, *others, row(1.0)], STEP, "one")
    assert found[UNSEEN] == pytest.approx(math.log(3.0) / Z_80, rel=0.01)


def test_other_figures_have_no_say_in_a_width():
    steps, peaks = [row(1.1)] * 12, [row(9.0, figure=PEAK)] * 12

    assert alike(steps[0], [*steps, *peaks]) == steps


def test_coverage_counts_the_rows_inside_of_what_the_other_parts_allow():
    """Alone, a calm part allows the other its eight closest of ten; a wild one allows all ten."""
    ratios = [1.1] * 7 + [1.29, 1.3, 1.31]
    calm = [row(ratio, part=part) for part in ("a", "b") for ratio in ratios]
    wild = [row(5.0, part="c")] * 5

    assert coverage(calm) == pytest.approx(16 / 20)
    assert coverage([*calm, *wild]) == pytest.approx(20 / 25)


@settings(max_examples=60, deadline=None)
@given(value=st.floats(1e-9, 1e12))
def test_a_rounded_factor_is_close_and_stays_as_it_is_when_rounded_again(value):
    assert rounded(value) == pytest.approx(value, rel=0.01)
    assert rounded(rounded(value)) == rounded(value)


def test_written_rows_are_read_back_by_any_reader_of_tables():
    told = LeftOut(STEP, SEEN, "r,1", 'an "engine"', "line\nend", "part", 1.5, 2.25)

    (read,) = csv.DictReader(io.StringIO(written([told]), newline=""))

    assert (read["row_id"], read["engine"], read["source"]) == (
        "r,1",
        'an "engine"',
        "line\nend",
    )
    assert (float(read["measured"]), float(read["predicted"])) == (1.5, 2.25)
