"""Columns come back bit for bit, and small."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from webapp.metrics import store

INT64 = st.integers(-(2**63), 2**63 - 1)
ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True, width=64)


def bits(column: np.ndarray) -> list[int]:
    return column.view(np.uint64).tolist()


@given(st.lists(st.tuples(INT64, ANY_FLOAT), max_size=200))
def test_any_columns_come_back_bit_for_bit(rows):
    integers = np.array([row[0] for row in rows], np.int64)
    floats = np.array([row[1] for row in rows], np.float64)
    decoded = store.decode(store.encode([integers, floats]))
    assert bits(decoded[0]) == bits(integers)
    assert bits(decoded[1]) == bits(floats)


@given(st.lists(st.integers(-(10**9), 10**9), min_size=1), st.integers(0, 3))
def test_decimals_come_back_bit_for_bit(numbers, decimals):
    floats = np.array([number / 10**decimals for number in numbers])
    assert bits(store.decode(store.encode([floats]))[0]) == bits(floats)


@pytest.mark.parametrize("value", [-0.0, float("nan"), float("inf"), 5e-324, 1e308, 0.1, 1 / 3])
def test_a_difficult_number_comes_back_bit_for_bit(value):
    column = np.array([value, 1.5, value])
    assert bits(store.decode(store.encode([column]))[0]) == bits(column)


def test_a_nan_keeps_its_payload():
    column = np.array([0x7FF8_0000_0000_BEEF], np.uint64).view(np.float64)
    assert bits(store.decode(store.encode([column]))[0]) == bits(column)


def test_jittered_times_cost_about_one_byte_each():
    jitter = np.random.default_rng(1).integers(-3, 4, 600)
    times = 1_700_000_000_000 + np.arange(600) * 1000 + jitter
    assert len(store.encode([times])) < 600 * 1.2


def test_utilisation_costs_less_than_one_byte_a_point():
    percent = np.random.default_rng(1).integers(90, 100, 600).astype(np.float64)
    assert len(store.encode([percent])) < 600


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="one length"):
        store.encode([np.zeros(2), np.zeros(3)])


@pytest.mark.parametrize("blob", [b"", b"\x63abc"])
def test_an_unknown_codec_is_refused_by_name(blob):
    with pytest.raises(ValueError, match="unknown metric codec"):
        store.decode(blob)
