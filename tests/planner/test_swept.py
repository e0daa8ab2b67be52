"""What sweeps say of a place: the layout, then the pair, the family of chips, or any."""

import numpy as np
import pytest

from planner.catalog.engines import get_engine
from planner.workload.layouts import Layout
from planner.workload.rates import Swept

PAIR = "64x5120x0/hopper"
CHIP = f"{PAIR}/h100/fp8"
PLACES = {
    "any": {"decode_linear": 1.0, "decode_issue": 5.0},
    "hopper": {"decode_linear": 2.0},
    PAIR: {"decode_linear": 3.0},
    f"{CHIP}/4-1-1": {"decode_linear": 4.0},
    f"{CHIP}/1-8-8": {"decode_linear": 8.0},
}
HABITS = {
    "any": {"burst_ratio": 0.1, "withheld_slots": 0.0},
    PAIR: {"burst_ratio": 0.3},
    f"{CHIP}/4-1-1": {"burst_ratio": 0.4},
    f"{CHIP}/1-8-8": {"burst_ratio": 0.8},
}


def swept(layout, pair=PAIR, chip=CHIP):
    told = {"serving_factors": PLACES, "arrival_factors": HABITS}
    engine = get_engine("vllm", "gpu").model_copy(update=told)
    return Swept(engine, pair, chip, layout)


@pytest.mark.parametrize(
    ("layout", "factor", "burst_ratio"),
    [
        (Layout(tensor=4), 4.0, 0.4),
        (Layout(tensor=4, data=2), 4.0, 0.4),
        (Layout(expert=8, attention_data=8), 8.0, 0.8),
        (Layout(tensor=2), 3.0, 0.3),
        (Layout(tensor=4, pipeline=2), 3.0, 0.3),
        (Layout(tensor=4, context=2), 3.0, 0.3),
        (Layout(tensor=4, expert=4), 3.0, 0.3),
    ],
)
def test_a_measured_layout_has_its_own_and_others_have_their_pairs(layout, factor, burst_ratio):
    found = swept(layout)

    assert found.factor("decode_linear") == factor
    assert found.habits.burst_ratio == burst_ratio


@pytest.mark.parametrize(
    ("pair", "factor"), [("1x1x0/hopper", 2.0), ("1x1x0/ampere", 1.0), (PAIR, 3.0)]
)
def test_without_a_layout_the_pair_tells_then_the_family_then_any(pair, factor):
    found = swept(Layout(tensor=4), pair=pair, chip=f"{pair}/another/bf16")

    assert found.factor("decode_linear") == factor


def test_a_part_that_no_sweep_shows_takes_what_it_is_like():
    found = swept(Layout(), pair="1x1x0/ampere", chip="1x1x0/ampere/a100/bf16")

    assert found.factor("decode_experts") == 1.0
    assert found.factor("decode_further") == 5.0
    assert found.factor("decode_scheduling") == 1.0


def test_columns_of_layouts_take_the_factors_of_each_row():
    tensors, attention = np.array([[1], [2], [4]]), np.array([1, 8])
    found = swept(Layout(tensor=tensors, expert=attention, attention_data=attention))
    alone = [
        [swept(Layout(tensor=int(t), expert=int(a), attention_data=int(a))) for a in attention]
        for t in tensors[:, 0]
    ]

    assert found.factor("decode_linear").tolist() == [
        [one.factor("decode_linear") for one in row] for row in alone
    ]
    assert found.habits.burst_ratio.tolist() == [
        [one.habits.burst_ratio for one in row] for row in alone
    ]


def test_habits_that_no_layout_shows_stay_as_they_are():
    assert swept(Layout(tensor=4), pair="1x1x0/ampere").habits.withheld_slots == 0.0


@pytest.mark.parametrize("layout", [Layout(tensor=4), Layout(expert=8, attention_data=8)])
def test_a_layout_is_found_again_under_its_own_name(layout):
    assert swept(layout).layout_name in PLACES
