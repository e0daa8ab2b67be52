"""Where a falling function crosses zero: one number and columns alike, in few steps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.quantity import STEPS, falling_root

SHAPES = st.sampled_from([0.5, 0.8, 1.0, 1.3])


def crossing(root, shape, top):
    """Return a falling function with its root at a place, and its values at both ends."""

    def function(x):
        return root**shape - x**shape

    return function, (1.0, top), (function(1.0), function(top))


@settings(max_examples=100, deadline=None)
@given(root=st.floats(1.01, 900.0), shape=SHAPES)
def test_a_smooth_function_is_met_closely(root, shape):
    function, ends, at_ends = crossing(root, shape, 1000.0)
    found = falling_root(function, ends, at_ends)
    assert ends[0] <= found <= ends[1]
    assert abs(function(found)) <= 0.01 * (at_ends[0] - at_ends[1])


def test_a_straight_line_is_met_exactly():
    function, ends, at_ends = crossing(37.0, 1.0, 4096.0)
    assert falling_root(function, ends, at_ends) == pytest.approx(37.0, rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(roots=st.lists(st.floats(1.5, 90.0), min_size=1, max_size=6), shape=SHAPES)
def test_a_column_gives_what_each_row_gives_alone(roots, shape):
    column = np.array(roots)
    function, ends, at_ends = crossing(column, shape, 100.0)
    found = falling_root(function, ends, at_ends)
    alone = [falling_root(*crossing(root, shape, 100.0)) for root in roots]
    assert found == pytest.approx(alone, rel=1e-9)


def test_a_function_is_asked_for_few_values():
    asked = []
    function, ends, at_ends = crossing(50.0, 0.3, 1000.0)

    def counted(x):
        asked.append(x)
        return function(x)

    falling_root(counted, ends, at_ends)
    assert len(asked) == STEPS


def test_a_sharp_kink_far_from_both_ends_is_met_within_a_fifth():
    def function(x):
        return 10.0 - x if x < 9 else (1.0 - 0.1 * (x - 9))

    found = falling_root(function, (1.0, 1000.0), (9.0, function(1000.0)))
    assert found == pytest.approx(19.0, rel=0.2)
