"""Waiting for others: the closed forms at their edges, each against a count by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.queueing import (
    chance_of_decode_overlap,
    mean_token_gap,
    poisson_prompts_before,
    prompts_waited_for,
    slot_wait,
    time_to_first_token,
)

ALONE = {
    "prefill_s": 0.3,
    "prompts_before": 0.0,
    "slot_s": 0.3,
    "decode_s": 0.02,
    "decoding_ratio": 0.0,
    "wait_s": 0.0,
    "intake_s": 0.0,
}
MANY = st.integers(min_value=1, max_value=4096)
SHARE = st.floats(min_value=0.0, max_value=1.0)
FEW = st.floats(min_value=0.0, max_value=8.0)


def test_a_burst_waits_for_the_mean_place_in_its_queue():
    """Of nine at once the first waits for none and the last for eight."""
    places = range(9)

    found = prompts_waited_for(running=9, burst_ratio=1.0, prompts_ahead=0.0)
    assert found == sum(places) / 9


@given(running=MANY, ahead=FEW, burst_ratio=SHARE)
def test_nobody_waits_for_more_prompts_than_a_burst_of_all_has(running, ahead, burst_ratio):
    found = prompts_waited_for(running=running, burst_ratio=burst_ratio, prompts_ahead=ahead)

    assert 0 <= found <= (running - 1) / 2 + 1e-9


@given(ahead=FEW, burst_ratio=SHARE)
def test_a_single_caller_waits_for_no_prompt(ahead, burst_ratio):
    assert prompts_waited_for(running=1, burst_ratio=burst_ratio, prompts_ahead=ahead) == 0.0


def test_independent_callers_meet_every_other_prefill_once_between_their_tokens():
    found = mean_token_gap(decode_s=1.0, running=5, output_tokens=8, slot_s=2.0, burst_ratio=0.0)

    assert found == 1.0 + 4 * 2.0 / 8


def test_callers_in_step_meet_half_of_the_other_prefills_between_their_tokens():
    """What was prefilled before a request's own first token cannot delay its second."""
    gaps = [
        mean_token_gap(decode_s=0.0, running=9, output_tokens=8, slot_s=1.0, burst_ratio=ratio)
        for ratio in (0.0, 1.0)
    ]

    assert gaps == [1.0, 0.5]


def test_alone_on_an_idle_engine_the_first_token_takes_the_prefill():
    assert time_to_first_token(**ALONE) == 0.3


def test_beside_decoding_requests_half_a_step_and_a_whole_one_come_before_the_first_token():
    found = time_to_first_token(**{**ALONE, "decoding_ratio": 1.0})

    assert found == pytest.approx(0.3 + 1.5 * 0.02)


def test_twice_the_callers_of_the_slots_wait_one_life_each():
    assert slot_wait(offered=8, running=4, withheld_slots=0, life_s=10.0) == 10.0


def test_one_withheld_slot_makes_each_caller_wait_its_share_of_a_life():
    assert slot_wait(offered=8, running=8, withheld_slots=1, life_s=64.0) == 8.0


def test_the_only_place_is_never_withheld():
    assert slot_wait(offered=1, running=1, withheld_slots=1, life_s=64.0) == 0.0


def test_an_idle_server_has_nobody_before_a_random_arrival():
    assert poisson_prompts_before(busy_ratio=0.0) == 0.0


def test_a_half_busy_server_has_half_a_prompt_before_a_random_arrival():
    """M/D/1 at a load of one half waits half a service."""
    assert poisson_prompts_before(busy_ratio=0.5) == pytest.approx(0.5)


def test_nobody_in_flight_is_no_company():
    assert chance_of_decode_overlap(in_flight=0.0) == 0.0
    assert chance_of_decode_overlap(in_flight=50.0) == pytest.approx(1.0)


def test_columns_give_what_single_numbers_give():
    running = np.array([1.0, 8.0, 64.0])
    columns = prompts_waited_for(running=running, burst_ratio=0.13, prompts_ahead=2.0)
    singles = [
        prompts_waited_for(running=float(b), burst_ratio=0.13, prompts_ahead=2.0) for b in running
    ]

    assert columns == pytest.approx(singles)
