"""Choices on numbers and on columns: the same answer, plain numbers stay plain."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost import quantity
from planner.cost.kv_cache import kv_cache_bytes

NUMBERS = st.floats(-1e12, 1e12)
COLUMNS = st.lists(NUMBERS, min_size=1, max_size=8)
TWO = (quantity.maximum, quantity.minimum)
ONE = (quantity.ceil, quantity.floor)


@pytest.mark.parametrize("choice", TWO)
@given(values=COLUMNS, other=NUMBERS)
def test_a_choice_between_two_is_the_same_element_by_element(choice, values, other):
    together = choice(np.array(values), other)

    assert together.tolist() == [choice(value, other) for value in values]


@pytest.mark.parametrize("rounding", ONE)
@given(values=COLUMNS)
def test_rounding_is_the_same_element_by_element(rounding, values):
    assert rounding(np.array(values)).tolist() == [rounding(value) for value in values]


@given(values=COLUMNS, limit=NUMBERS)
def test_a_branch_is_taken_element_by_element(values, limit):
    column = np.array(values)
    together = quantity.where(column > limit, column, limit)

    assert together.tolist() == [quantity.where(v > limit, v, limit) for v in values]


def test_plain_numbers_stay_plain():
    found = (
        quantity.where(True, 1.0, 2.0),
        quantity.maximum(1.0, 2.0),
        quantity.minimum(1.0, 2.0),
        quantity.ceil(1.5),
        quantity.floor(1.5),
        quantity.round_up(17.0, 16.0),
        quantity.largest([1.0, 3.0, 2.0]),
    )

    assert found == (1.0, 2.0, 1.0, 2.0, 1.0, 32.0, 3.0)
    assert {type(value) for value in found} == {float}


def test_the_largest_of_columns_is_taken_element_by_element():
    found = quantity.largest([np.array([1.0, 5.0]), 3.0, np.array([2.0, 4.0])])

    assert found.tolist() == [3.0, 5.0]


def test_axes_of_different_choices_make_a_grid():
    tensor, batch = np.array([[1.0], [4.0]]), np.array([[2.0, 3.0, 8.0]])

    assert quantity.maximum(tensor, batch).tolist() == [[2, 3, 8], [4, 4, 8]]


@given(left=st.booleans(), right=st.booleans())
def test_conditions_join_alike_on_numbers_and_columns(left, right):
    one, other = np.array([left]), np.array([right])

    assert quantity.both(one, other).tolist() == [quantity.both(left, right)]
    assert quantity.either(one, other).tolist() == [quantity.either(left, right)]
    assert quantity.negate(one).tolist() == [quantity.negate(left)]


def test_conditions_on_plain_numbers_are_plain():
    assert quantity.both(True, False) is False
    assert quantity.either(True, False) is True
    assert quantity.negate(False) is True


def test_a_divisor_divides_its_multiples():
    assert quantity.divides(4, 12) is True
    assert quantity.divides(np.array([4, 5]), 12).tolist() == [True, False]


def test_a_condition_that_holds_anywhere_is_worth_costing():
    assert quantity.any_of(np.array([False, True]))
    assert not quantity.any_of(np.array([False, False]))
    assert quantity.any_of(True)


def test_a_formula_takes_a_column_of_layouts():
    fields = {"head_dim": 128, "kv_bytes_per_element": 2, "num_layers": 80, "num_tokens": 4096}
    together = kv_cache_bytes(
        num_kv_heads=8, tensor_parallel_size=np.array([1.0, 2.0, 16.0]), **fields
    )

    each = [kv_cache_bytes(num_kv_heads=8, tensor_parallel_size=t, **fields) for t in (1, 2, 16)]
    assert together.tolist() == each
