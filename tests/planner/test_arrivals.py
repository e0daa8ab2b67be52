"""The simulated engine: laws of queues that hold whatever the steps cost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.workload.arrivals import (
    Batching,
    StepCosts,
    Traffic,
    _Engine,
    poisson_calls,
    simulate,
    steps_until,
)

# 1 ms per prompt token; a decode step takes 10 ms and 1 ms per request, whatever is cached.
COSTS = StepCosts([0.0, 10_000.0], [0.0, 10.0], [0.0, 1000.0], [0.010, 1.010], [0.0, 0.0])
GROWING = StepCosts([0.0, 10_000.0], [0.0, 10.0], [0.0, 1000.0], [0.010, 1.010], [1e-6, 1e-6])
UNEVEN = ([0.01, 0.013, 0.0307], [1.1e-6, 1.3e-6, 1.7e-6])
OPEN = Batching(slots=1000, budget_tokens=8192)


def closed(callers=8, calls=5, spread=0.0, batching=OPEN, prompt=100.0, output=20):
    traffic = Traffic(prompt, output, [0.0] * callers, calls, spread)
    return simulate(batching, traffic, COSTS)


def opened(rate, count=400, batching=OPEN, seed=0, costs=COSTS):
    traffic = Traffic(100.0, 20, poisson_calls(rate, count, seed), 1, 0.1)
    return simulate(batching, traffic, costs)


def test_a_single_request_takes_its_prefill_and_then_its_steps():
    alone = closed(callers=1, calls=1)

    assert alone.ttft_s == pytest.approx([0.1])
    assert alone.tpot_s == pytest.approx([0.011])
    assert alone.latency_s == pytest.approx([0.1 + 19 * 0.011])


def test_a_request_of_one_token_is_done_with_its_first():
    one = closed(callers=1, calls=1, output=1)

    assert one.latency_s == pytest.approx(one.ttft_s)
    assert len(one.tpot_s) == 0


def test_steps_get_longer_with_what_is_cached():
    """Twenty tokens after a prompt of 100: the k-th step reads 100 + k cached tokens."""
    alone = simulate(OPEN, Traffic(100.0, 20, [0.0]), GROWING)
    expected = sum(0.011 + 1e-6 * (100 + k) for k in range(1, 20))

    assert alone.latency_s[0] - alone.ttft_s[0] == pytest.approx(expected)


def test_a_burst_waits_half_of_all_prefills_in_the_mean():
    """One prompt a step, before anything decodes: the i-th answer comes after i prompts."""
    batching = Batching(slots=100, budget_tokens=100, prefill_first=True)
    burst = closed(callers=9, calls=1, batching=batching)

    assert burst.ttft_s.mean() == pytest.approx(0.1 * (9 + 1) / 2)


def test_callers_that_prefill_together_stay_together():
    """Nothing takes a cohort apart when prefill goes first and answers have one length."""
    batching = Batching(slots=100, budget_tokens=100, prefill_first=True)
    waves = closed(callers=6, calls=4, batching=batching).ttft_s.reshape(4, 6)

    assert waves.mean(axis=1) == pytest.approx([0.35] * 4)


def test_a_prompt_longer_than_the_budget_is_read_in_chunks():
    small = closed(callers=1, calls=1, batching=Batching(10, 30.0))

    assert small.ttft_s == pytest.approx([0.1])
    assert small.events > closed(callers=1, calls=1).events


@settings(max_examples=25, deadline=None)
@given(callers=st.integers(1, 40), slots=st.integers(1, 40), spread=st.sampled_from([0.0, 0.3]))
def test_every_request_is_answered_after_it_was_sent(callers, slots, spread):
    found = closed(callers, 3, spread, Batching(slots, 256))

    assert len(found.sent_s) == 3 * callers
    assert np.all(found.first_s > found.sent_s)
    assert np.all(found.done_s >= found.first_s)


@settings(max_examples=25, deadline=None)
@given(callers=st.integers(1, 40), slots=st.integers(1, 20))
def test_never_more_requests_run_than_there_are_places(callers, slots):
    found = closed(callers, 3, 0.2, Batching(slots, 8192))
    times = np.concatenate([found.first_s, found.done_s])
    changes = np.concatenate([np.ones(len(found.first_s)), -np.ones(len(found.done_s))])
    order = np.lexsort((changes, times))

    assert np.cumsum(changes[order]).max() <= slots


@pytest.mark.parametrize("rate", [0.5, 2.0, 5.0])
def test_littles_law_holds(rate):
    """Requests in flight, averaged over time, are the rate times the mean latency."""
    found = opened(rate)
    span = found.done_s.max() - found.sent_s.min()
    ends = np.sort(np.concatenate([found.sent_s, found.done_s]))
    inside = np.searchsorted(np.sort(found.sent_s), ends, "right") - np.searchsorted(
        np.sort(found.done_s), ends, "right"
    )
    in_flight = float((inside[:-1] * np.diff(ends)).sum() / span)

    assert in_flight == pytest.approx(found.requests_per_s * found.latency_s.mean(), rel=1e-6)


def test_equal_seeds_give_equal_answers():
    assert np.array_equal(opened(3.0).done_s, opened(3.0).done_s)
    assert not np.array_equal(opened(3.0).done_s, opened(3.0, seed=1).done_s)


def test_a_faster_stream_of_the_same_calls_waits_longer():
    means = [opened(rate).ttft_s.mean() for rate in (0.5, 2.0, 4.0, 8.0)]

    assert means == sorted(means)


def test_an_almost_idle_engine_answers_as_if_alone():
    assert np.median(opened(0.01).ttft_s) == pytest.approx(0.1)


def test_more_than_the_engine_can_do_makes_the_queue_grow():
    """A prefill takes 0.1 s, so that ten a second are the most whatever the batch."""
    waits = opened(20.0).ttft_s

    assert waits[-100:].mean() > 3 * waits[:100].mean()


def test_a_place_less_makes_one_caller_wait_a_whole_life():
    free, short = (closed(4, 20, 0.0, Batching(slots, 8192)) for slots in (4, 3))
    life = short.latency_s.min()

    assert short.ttft_s.mean() - free.ttft_s.mean() == pytest.approx(life / 3, rel=0.5)


def test_one_place_serves_one_after_another():
    found = closed(5, 1, 0.0, Batching(1, 8192))
    life = 0.1 + 19 * 0.011

    assert np.sort(found.done_s) == pytest.approx(life * np.arange(1, 6))


@given(
    seconds=st.floats(0.01, 50), first=st.floats(0.001, 1), growth=st.sampled_from([0, 1e-5, 1e-3])
)
def test_the_steps_until_a_moment_are_the_fewest_that_reach_it(seconds, first, growth):
    steps = steps_until(seconds, first, growth)

    def reached(count):
        return count * first + growth * count * (count - 1) / 2

    assert reached(steps) >= seconds * (1 - 1e-6)
    assert steps == 1 or reached(steps - 1) < seconds * (1 + 1e-6)


def test_a_moment_that_has_passed_still_takes_a_step():
    assert steps_until(0.0, 0.1, 0.0) == 1


def test_poisson_calls_come_at_their_rate():
    calls = poisson_calls(4.0, 4000)

    assert calls == sorted(calls)
    assert len(calls) / calls[-1] == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize("spread", [0.0, 0.03])
@pytest.mark.parametrize("is_prefill_first", [False, True])
@pytest.mark.parametrize(("slots", "budget", "prompt"), [(4, 64, 100.0), (9, 512, 37.5)])
def test_the_steps_of_a_closed_loop_are_timed_bit_by_bit_as_they_were_taken(
    slots, budget, prompt, is_prefill_first, spread
):
    batching = Batching(slots, budget, is_prefill_first)
    traffic = Traffic(prompt, 20, [0.0] * 7, 5, spread)
    uneven = StepCosts([1.0, 32.0, 512.0], [0.011, 0.013, 0.07], [1.0, 4.0, 16.0], *UNEVEN)
    engine = _Engine(batching, traffic, uneven)
    engine.run()

    timed = simulate(batching, traffic, uneven)

    assert timed.events == engine.events
    assert timed.sent_s.tolist() == engine.requests.sent_s
    assert timed.first_s.tolist() == engine.requests.first_s
    assert timed.done_s.tolist() == engine.requests.done_s
