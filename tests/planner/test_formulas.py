"""Every formula stands once: floats and numpy columns go through the same function."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost import (
    communication,
    kv_cache,
    parameters,
    quantity,
    queueing,
    roofline,
    training,
    weights,
)
from planner.cost.communication import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    point_to_point_seconds,
)
from planner.cost.kv_cache import kv_cache_bytes
from planner.cost.quantity import Equation, Ledger, Line, PerLayerGroup
from planner.cost.weights import linear_bytes, linear_parameters_per_rank, weight_bytes
from planner.workload import compress, serve, train

MODULES = (
    training,
    communication,
    roofline,
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
# Three numbers for each argument of the formula that has the most.
MANY = 3 * max(len(formula.symbols) for formula in FORMULAS.values())
NUMBERS = st.lists(st.floats(min_value=1.0, max_value=1e6), min_size=MANY, max_size=MANY)


@settings(max_examples=15, deadline=None)
@given(drawn=NUMBERS)
def test_a_formula_gives_the_same_for_floats_and_for_columns(drawn):
    wrong = []
    for name, formula in FORMULAS.items():
        types = formula.compute.__annotations__
        given_ = {each: drawn[3 * at : 3 * at + 3] for at, each in enumerate(formula.symbols)}
        columns = {each: row for each, row in given_.items() if types[each] is not float}
        numbers = {each: row[0] for each, row in given_.items() if each not in columns}
        if {"num_experts", "experts_per_token"} <= numbers.keys():  # no more than all
            numbers["experts_per_token"] = min(
                numbers["experts_per_token"], numbers["num_experts"]
            )

        together = formula(**{each: np.array(row) for each, row in columns.items()}, **numbers)

        alone = [
            float(formula(**{each: row[index] for each, row in columns.items()}, **numbers))
            for index in range(3)
        ]
        if not np.allclose([np.asarray(together)[index] for index in range(3)], alone, rtol=1e-9):
            wrong.append((name, given_, together, alone))
    assert not wrong, wrong


def test_a_formula_names_each_argument_what_it_returns_and_its_unit():
    assert len(FORMULAS) > 70
    wrong = [
        name
        for name, formula in FORMULAS.items()
        if set(formula.symbols) != set(formula.compute.__annotations__) - {"return"}
        or not (formula.unit or name.endswith("_share"))  # a share has no unit
        or not formula.compute.__doc__
    ]
    assert not wrong, wrong


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


def test_a_ledger_writes_down_the_equation_with_its_values_and_factor():
    ledger = Ledger()
    ledger.term(roofline.matmul_flops, Line("g", "Products"), parameters=10.0, num_tokens=3.0)
    (term,) = ledger.terms()
    assert (term.equation, term.value, term.unit) == ("F = 2 · n · T", 60.0, "FLOP")
    assert [(i.symbol, i.value) for i in term.inputs] == [("n", 10), ("T", 3)]

    # A calibration factor is part of the written equation.
    ledger, line = Ledger(), Line("g", "Products", factor=1.5)
    value = ledger.term(roofline.matmul_flops, line, parameters=10.0, num_tokens=3.0)
    assert value == 90.0
    assert ledger.terms()[0].equation == "F = k · (2 · n · T)"
    assert ledger.terms()[0].inputs[-1].value == 1.5


VALUES = st.floats(-1e12, 1e12)
COLUMNS = st.lists(VALUES, min_size=1, max_size=8)


@given(values=COLUMNS, other=VALUES)
def test_choices_between_two_and_rounding_are_the_same_element_by_element(values, other):
    for choice in (quantity.maximum, quantity.minimum):
        together = choice(np.array(values), other)
        assert together.tolist() == [choice(value, other) for value in values]
    for rounding in (quantity.ceil, quantity.floor):
        assert rounding(np.array(values)).tolist() == [rounding(value) for value in values]


@given(values=COLUMNS, limit=VALUES)
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
    assert quantity.both(True, False) is False
    assert quantity.either(True, False) is True
    assert quantity.negate(False) is True


def test_columns_are_chosen_divided_and_joined_element_by_element():
    # The largest of columns is taken element by element.
    found = quantity.largest([np.array([1.0, 5.0]), 3.0, np.array([2.0, 4.0])])
    assert found.tolist() == [3.0, 5.0]
    # Axes of different choices make a grid.
    tensor, batch = np.array([[1.0], [4.0]]), np.array([[2.0, 3.0, 8.0]])
    assert quantity.maximum(tensor, batch).tolist() == [[2, 3, 8], [4, 4, 8]]
    # A divisor divides its multiples.
    assert quantity.divides(4, 12) is True
    assert quantity.divides(np.array([4, 5]), 12).tolist() == [True, False]
    # A condition that holds anywhere is worth costing.
    assert quantity.any_of(np.array([False, True]))
    assert not quantity.any_of(np.array([False, False]))
    assert quantity.any_of(True)

    # A formula takes a column of layouts.
    fields = {"head_dim": 128, "kv_bytes_per_element": 2, "num_layers": 80, "num_tokens": 4096}
    together = kv_cache_bytes(
        num_kv_heads=8, tensor_parallel_size=np.array([1.0, 2.0, 16.0]), **fields
    )
    each = [kv_cache_bytes(num_kv_heads=8, tensor_parallel_size=t, **fields) for t in (1, 2, 16)]
    assert together.tolist() == each


@given(left=st.booleans(), right=st.booleans())
def test_conditions_join_alike_on_numbers_and_columns(left, right):
    one, other = np.array([left]), np.array([right])
    assert quantity.both(one, other).tolist() == [quantity.both(left, right)]
    assert quantity.either(one, other).tolist() == [quantity.either(left, right)]
    assert quantity.negate(one).tolist() == [quantity.negate(left)]


LINK = {"link_bytes_per_s": 100e9, "latency_s": 1e-5}


def test_collectives_are_as_large_as_the_ring_makes_them():
    # One rank talks to nobody.
    for collective in [
        all_reduce_seconds,
        all_gather_seconds,
        all_to_all_seconds,
        point_to_point_seconds,
    ]:
        assert float(collective(payload_bytes=1e9, ranks=1, **LINK)) == 0.0

    # An all reduce moves the payload twice less the own share.
    seconds = all_reduce_seconds(payload_bytes=1e9, ranks=8, **LINK)
    assert float(seconds) == pytest.approx(2 * 7 / 8 * 1e9 / 100e9 + 1e-5)
    # An all reduce is two all gathers.
    whole = all_reduce_seconds(payload_bytes=1e9, ranks=4, link_bytes_per_s=1e11, latency_s=0)
    half = all_gather_seconds(payload_bytes=1e9, ranks=4, link_bytes_per_s=1e11, latency_s=0)
    assert float(whole) == pytest.approx(2 * float(half))
    # Small payloads cost the latency.
    seconds = all_reduce_seconds(payload_bytes=1, ranks=8, **LINK)
    assert float(seconds) == pytest.approx(1e-5, rel=1e-3)
    # A hand over passes every border between stages.
    two = point_to_point_seconds(payload_bytes=1e6, ranks=2, **LINK)
    five = point_to_point_seconds(payload_bytes=1e6, ranks=5, **LINK)
    assert float(five) == pytest.approx(4 * float(two))

    # A column of ranks gives the same as each rank alone.
    ranks = np.array([1.0, 2.0, 4.0, 8.0])
    together = all_reduce_seconds(payload_bytes=1e8, ranks=ranks, **LINK)
    alone = [float(all_reduce_seconds(payload_bytes=1e8, ranks=n, **LINK)) for n in ranks]
    assert np.allclose(together, alone)


AMOUNTS = st.integers(0, 10**12)


@given(split=AMOUNTS, key_value=AMOUNTS, experts=AMOUNTS, whole=AMOUNTS)
def test_one_rank_alone_holds_everything(split, key_value, experts, whole):
    found = linear_parameters_per_rank(
        split=split,
        key_value=key_value,
        experts=experts,
        tensor_parallel_size=1,
        kv_share=1,
        expert_ranks=1,
        replicated=whole,
    )
    assert found == pytest.approx(split + key_value + experts + whole)


def test_weights_are_cut_along_their_own_axes():
    # A rank cuts each kind of weight along its own axis.
    found = linear_parameters_per_rank(
        split=800,
        key_value=160,
        experts=6400,
        tensor_parallel_size=8,
        kv_share=0.25,
        expert_ranks=16,
        replicated=7,
    )
    assert found == 100 + 40 + 400 + 7

    # Norms are whole on each rank and the vocabulary is not.
    found = weight_bytes(
        linear=1000,
        small=10,
        vocabulary=400,
        tensor_parallel_size=4,
        weight_bytes_per_element=0.5,
        plain_bytes_per_element=2,
        vocabulary_bytes_per_element=1.5,
    )
    assert found == 500 + 20 + 150
    assert linear_bytes(linear=1000, weight_bytes_per_element=0.5) == 500


@given(values=st.lists(st.integers(-1000, 1000), min_size=1, max_size=6), factor=st.integers(1, 9))
def test_scaling_the_groups_scales_their_sum(values, factor):
    group = PerLayerGroup(tuple(values))
    assert (group * factor).total == (factor * group).total == factor * sum(values)
    assert (group * factor / factor).total == pytest.approx(sum(values))
    assert (group + group).values == (group * 2).values


def test_groups_scale_as_columns_and_only_with_their_own_kind():
    # Groups of different models cannot be added.
    with pytest.raises(ValueError, match="zip"):
        PerLayerGroup((1.0, 2.0)) + PerLayerGroup((1.0,))
    # A column on the left scales each group as a column.
    found = np.array([1.0, 2.0]) * PerLayerGroup((3.0, 5.0))
    assert [list(value) for value in found.values] == [[3.0, 6.0], [5.0, 10.0]]
    assert list(found.total) == [8.0, 16.0]
