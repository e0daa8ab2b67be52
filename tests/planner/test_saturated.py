"""Every place taken: steps that read prompts beside decoding, waves of a burst, the limits."""

import pytest

from planner.api import estimate
from planner.cost.quantity import Ledger
from planner.cost.queueing import cycle_seconds, first_token_of_many, mixed_steps, waves_seconds
from planner.specs.estimate import EstimateRequest
from planner.workload.resolve import resolve
from planner.workload.serve import fills_places, mixed_work, serve, step_budget

LLAMA = "meta-llama/Llama-3.1-8B"
LENGTHS = {"input_tokens": 1000, "output_tokens": 500}


def request(devices=1, strategy=None, engine="tensorrt_llm", model=LLAMA, **workload):
    return EstimateRequest.model_validate(
        {
            "model": model,
            "cluster": {"device": "h100-sxm-80gb", "devices_per_node": devices},
            "workload": {"kind": "serve", **LENGTHS, **workload},
            "strategy": {"tensor_parallel_size": devices, **(strategy or {})},
            "engine": engine,
        }
    )


def rate(**asked):
    return estimate(request(**asked)).performance.output_tokens_per_second


def recorded(**asked):
    setting, ledger = resolve(request(**asked)), Ledger()
    serve(setting, setting.workload, ledger)
    return ledger


def test_a_cycle_is_its_mixed_steps_and_the_packed_rest():
    seconds = cycle_seconds(mixed_steps=20.0, mixed_s=0.5, output_tokens=100, packed_s=0.02)

    assert seconds == pytest.approx(20 * 0.5 + 80 * 0.02)


def test_prompts_are_read_in_as_many_steps_as_chunks():
    assert mixed_steps(running=64, prompt_tokens=1000.0, chunk_tokens=8000.0) == 8


def test_a_burst_takes_its_waves_and_the_last_ones_decoding():
    whole = waves_seconds(waves=3, cycle_s=10.0, mixed_steps=20.0, packed_s=0.02)

    assert whole == pytest.approx(30.4)


def test_the_first_token_waits_for_a_place_and_its_own_steps():
    assert first_token_of_many(waited_s=1.0, own_steps=2.0, mixed_s=0.25) == 1.5


def test_a_step_is_filled_to_its_token_budget():
    setting = resolve(request())
    work = mixed_work(setting, setting.workload, own=192.0, chunk=8000.0)

    assert work.new_tokens == step_budget(setting, 1000.0) == 8192


def test_short_steps_cut_a_prompt_into_pieces_that_see_what_was_read():
    setting = resolve(request())
    whole = mixed_work(setting, setting.workload, own=0.0, chunk=1000.0)
    cut = mixed_work(setting, setting.workload, own=0.0, chunk=250.0)

    assert 4 * cut.token_pairs.total == pytest.approx(whole.token_pairs.total)
    assert 4 * cut.read_layer_tokens.total > whole.read_layer_tokens.total


def test_a_shared_prefix_is_attended_to_and_not_read_again():
    plain, shared = rate(), rate(prefix_share_ratio=0.9)

    assert shared > 1.2 * plain


def test_a_full_batch_makes_as_many_tokens_as_its_steps_allow():
    ledger = recorded()
    told = {entry.key: entry for entry in ledger.entries}
    cycle, places = told["cycle"].value, told["mixed_steps"].inputs()[0].value

    assert rate() == pytest.approx(places * LENGTHS["output_tokens"] / cycle)


@pytest.mark.parametrize("name", ["input_tokens", "output_tokens"])
def test_longer_requests_leave_more_rarely(name):
    short, long = (estimate(request(**{name: n})).performance for n in (500, 2000))

    assert long.requests_per_second < short.requests_per_second


def test_no_batch_computes_faster_than_the_peak():
    tokens = rate(input_tokens=2000, output_tokens=100, strategy={"weight_dtype": "bf16"})
    computed = tokens * (2000 + 100) / 100 * 2 * 7.5e9

    assert computed < 989e12


def test_no_batch_reads_its_weights_faster_than_memory_allows():
    found = estimate(request(burst_requests=1)).performance

    assert found.output_tokens_per_second * 15e9 < 3.35e12


def test_two_waves_take_as_long_as_each_of_them():
    most = estimate(request(burst_requests=1)).performance.max_concurrency
    one, two = (rate(burst_requests=waves * most) for waves in (1, 2))

    assert one == pytest.approx(two, rel=0.1)
    assert one < two


def test_a_second_wave_reads_the_weights_once_more():
    most = estimate(request(burst_requests=1)).performance.max_concurrency

    assert rate(burst_requests=most + 1) < 0.95 * rate(burst_requests=most)


def test_a_long_burst_comes_near_to_an_endless_stream():
    most = estimate(request(burst_requests=1)).performance.max_concurrency

    assert rate(burst_requests=50 * most) == pytest.approx(rate(), rel=0.02)


def test_replicas_share_a_burst():
    one = rate(burst_requests=100)
    two = estimate(
        request(
            devices=2,
            strategy={"tensor_parallel_size": 1, "data_parallel_size": 2},
            burst_requests=200,
        )
    )

    assert two.performance.output_tokens_per_second == pytest.approx(2 * one)


def test_an_engine_holds_no_more_requests_than_it_schedules():
    short = {"input_tokens": 16, "output_tokens": 16}
    ledger = recorded(**short)
    told = {entry.key: entry for entry in ledger.entries}

    assert told["mixed_steps"].inputs()[0].value == 2048


def test_prompts_that_fill_every_step_leave_fewer_to_decode():
    long = {"input_tokens": 4000, "output_tokens": 10}
    ledger = recorded(**long)
    told = {entry.key: entry for entry in ledger.entries}
    running, _, chunk = (one.value for one in told["mixed_steps"].inputs())

    assert running + chunk == pytest.approx(8192)
    assert told["mixed_steps"].value == pytest.approx(10)


def test_those_who_do_not_decode_wait_for_their_prompt():
    found = estimate(request(input_tokens=4000, output_tokens=10)).performance
    held = found.requests_per_second * found.latency_seconds

    assert held == pytest.approx(found.max_concurrency, rel=0.2)


@pytest.mark.parametrize(
    "apart",
    [
        {"concurrency": 8},
        {"request_rate_per_second": 1.0},
        {"strategy": {"offload": {"weights_cpu": 0.5}}},
    ],
)
def test_other_arrivals_and_offload_keep_prefill_and_decode_apart(apart):
    setting = resolve(request(**apart))

    assert not fills_places(setting, setting.workload)


def test_sorting_tokens_by_expert_costs_time_where_tables_show_it():
    ledger = recorded(model="Qwen/Qwen3-30B-A3B")
    moved = [e for e in ledger.entries if e.name == "Moving tokens to and from experts"]

    assert {entry.group for entry in moved} == {"mixed", "packed"}
    assert all(entry.value > 0 for entry in moved)


def test_a_dense_model_moves_no_token_to_an_expert():
    names = {entry.name for entry in recorded().entries}

    assert "Moving tokens to and from experts" not in names
