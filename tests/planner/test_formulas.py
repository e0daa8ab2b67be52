"""Every formula stands once: floats and numpy columns go through the same function."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost import (
    activations,
    communication,
    energy,
    kv_cache,
    parameters,
    queueing,
    roofline,
    training,
    weights,
)
from planner.cost.quantity import Equation, Ledger, Line
from planner.workload import compress, serve, train

MODULES = (
    activations,
    communication,
    energy,
    kv_cache,
    parameters,
    queueing,
    roofline,
    training,
    weights,
    compress,
    serve,
    train,
)
FORMULAS = {
    value.key: value
    for module in MODULES
    for value in vars(module).values()
    if isinstance(value, Equation)
}
NUMBERS = st.floats(min_value=1.0, max_value=1e6)


@pytest.mark.parametrize("name", sorted(FORMULAS))
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_formula_gives_the_same_for_floats_and_for_columns(name, data):
    formula = FORMULAS[name]
    types = formula.compute.__annotations__
    columns = {
        symbol: data.draw(st.lists(NUMBERS, min_size=3, max_size=3))
        for symbol in formula.symbols
        if types[symbol] is not float
    }
    numbers = {symbol: data.draw(NUMBERS) for symbol in formula.symbols if symbol not in columns}
    if {"num_experts", "experts_per_token"} <= numbers.keys():  # a token takes no more than all
        numbers["experts_per_token"] = min(numbers["experts_per_token"], numbers["num_experts"])

    together = formula(**{each: np.array(column) for each, column in columns.items()}, **numbers)

    for index in range(3):
        alone = formula(**{each: column[index] for each, column in columns.items()}, **numbers)
        assert np.allclose(np.asarray(together)[index], float(alone), rtol=1e-9)


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_a_formula_names_a_symbol_for_each_argument(name):
    formula = FORMULAS[name]
    arguments = set(formula.compute.__annotations__) - {"return"}

    assert set(formula.symbols) == arguments


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_a_formula_says_what_it_returns_and_in_which_unit(name):
    assert FORMULAS[name].unit or name.endswith("_share")  # a share has no unit
    assert FORMULAS[name].compute.__doc__


@given(value=st.floats(min_value=1.0, max_value=1e15))
def test_rounding_up_to_pages_never_loses_a_token(value):
    kept = float(kv_cache.cached_tokens(value, None, paged=True))

    assert value <= kept < value + kv_cache.BLOCK_TOKENS + 1


@given(sequence=st.integers(1, 5000), window=st.integers(1, 5000))
def test_a_window_never_sees_more_pairs_than_the_whole_triangle(sequence, window):
    whole = float(roofline.causal_pairs(sequence))

    assert float(roofline.causal_pairs(sequence, window)) <= whole


@given(sequence=st.integers(1, 300), window=st.integers(1, 300))
def test_causal_pairs_equal_counting_them(sequence, window):
    counted = sum(min(query + 1, window) for query in range(sequence))

    assert float(roofline.causal_pairs(sequence, window)) == counted


@given(document=st.integers(1, 3000), block=st.sampled_from([16, 128]))
def test_blocks_of_packed_rows_equal_counting_where_the_document_before_began(document, block):
    row = 64 * block
    before = sum(-(-offset // block) for offset in range(document)) / document
    counted = 64 * block**2 * min(65 / 2, 1 + before)

    found = roofline.block_pairs(row_tokens=row, document_tokens=document, block_tokens=block)
    assert float(found) == pytest.approx(counted)
    assert float(found) >= float(roofline.causal_pairs(min(document, row)))


def test_a_checkpoints_copy_by_hand():
    alone, gathered = (
        training.checkpoint_copy_bytes(
            parameters=1e6,
            weight_bytes_per_element=4,
            state_bytes_per_element=8,
            parts_share=share,
            gathered_share=gathers,
        )
        for share, gathers in ((1, 0), (0.5, 1))
    )

    assert (alone, gathered) == (12e6, 18e6)


def test_a_ledger_writes_down_the_equation_with_its_values():
    ledger = Ledger()

    ledger.term(roofline.matmul_flops, Line("g", "Products"), parameters=10.0, num_tokens=3.0)

    (term,) = ledger.terms()
    assert (term.equation, term.value, term.unit) == ("F = 2 · n · T", 60.0, "FLOP")
    assert [(i.symbol, i.value) for i in term.inputs] == [("n", 10), ("T", 3)]


def test_a_calibration_factor_is_part_of_the_written_equation():
    ledger = Ledger()

    line = Line("g", "Products", factor=1.5)
    value = ledger.term(roofline.matmul_flops, line, parameters=10.0, num_tokens=3.0)

    assert value == 90.0
    assert ledger.terms()[0].equation == "F = k · (2 · n · T)"
    assert ledger.terms()[0].inputs[-1].value == 1.5
