"""Whole runs and thrifty exchanges: schedules, budgets, padding, compressed gradients, scales."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from planner.catalog.models import get_model
from planner.cost.training import output_widths, scale_parameters
from planner.specs.workload import TrainWorkload
from tests.planner.asking import LLAMA_8B, TRAIN, ask, held

few = settings(max_examples=20, deadline=None)
SLOW = {"device": "a100-sxm4-80gb", "nodes": 4, "inter_node_bandwidth_bytes_per_second": 1e9}
RUN = {**TRAIN, "method": "pretrain", "tokens": 1_000_000_000}
SMALL = {"model": "EleutherAI/pythia-160m", "engine": "llm_foundry"}


def run(**workload):
    return ask(**SMALL, workload={**RUN, **workload}).performance


def exchanging(**strategy):
    strategy = {"micro_batch_size": 1, **strategy}
    return ask(cluster=SLOW, workload=TRAIN, engine="megatron", strategy=strategy)


def test_a_schedule_of_the_longest_length_alone_is_no_schedule():
    plain, scheduled = run(), run(length_schedule=[[2048, 1.0]])

    assert scheduled.duration_seconds == pytest.approx(plain.duration_seconds)


@few
@given(share=st.floats(0.01, 1.0), length=st.sampled_from([128, 256, 512, 1024]))
def test_shorter_sequences_first_never_take_longer(share, length):
    schedule = [[length, share], [2048, 1.0 - share]]

    assert run(length_schedule=schedule).duration_seconds <= run().duration_seconds * (1 + 1e-9)


def test_growing_lengths_leave_memory_and_the_longest_step_alone():
    schedule = {"length_schedule": [[128, 0.5], [2048, 0.5]]}
    plain = ask(**SMALL, workload=RUN)
    grown = ask(**SMALL, workload={**RUN, **schedule})

    assert grown.memory == plain.memory
    assert grown.performance.step_seconds == plain.performance.step_seconds


def test_the_shares_of_a_schedule_make_a_whole():
    with pytest.raises(ValidationError, match=r"add up to 0\.75, not 1"):
        TrainWorkload(**RUN, length_schedule=[[128, 0.25], [256, 0.5]])


def test_a_schedule_does_not_reach_beyond_the_longest():
    with pytest.raises(ValidationError, match="reaches 4096 tokens"):
        TrainWorkload(**RUN, length_schedule=[[4096, 1.0]])


def test_a_time_budget_gives_the_tokens_that_it_suffices_for():
    found = run(time_budget_seconds=86_400, tokens=None)

    assert found.duration_seconds == 86_400
    assert found.trained_tokens == pytest.approx(86_400 * found.tokens_per_second)


def test_without_a_budget_no_tokens_are_counted():
    assert run().trained_tokens is None


@few
@given(padding=st.floats(0.0, 0.9))
def test_only_text_counts_as_trained(padding):
    padded = run(padding_ratio=padding)

    assert padded.tokens_per_second == pytest.approx(run().tokens_per_second * (1 - padding))
    assert padded.step_seconds == run().step_seconds


@few
@given(padding=st.sampled_from([0.1, 0.25, 0.5, 0.75]))
def test_packing_takes_the_padding_out_of_work_and_memory(padding):
    workload = {**RUN, "padding_ratio": padding}
    padded, packed = (
        ask(**SMALL, workload=workload, strategy={"packed": how, "micro_batch_size": 4})
        for how in (False, True)
    )

    assert held(packed, "activations") == pytest.approx(
        held(padded, "activations") * (1 - padding), rel=1e-6
    )
    assert packed.performance.tokens_per_second > padded.performance.tokens_per_second


def test_packing_a_batch_without_padding_changes_nothing():
    plain, packed = (ask(**SMALL, workload=RUN, strategy={"packed": how}) for how in (False, True))

    assert packed.performance == plain.performance


@few
@given(ratio=st.floats(1.0, 100.0))
def test_smaller_gradients_never_slow_a_step(ratio):
    plain, squeezed = exchanging(), exchanging(gradient_compression_ratio=ratio)

    assert squeezed.performance.step_seconds <= plain.performance.step_seconds
    assert squeezed.memory == plain.memory


def test_an_interval_of_steps_saves_as_much_as_a_ratio():
    squeezed, rare = (
        exchanging(**{name: 8})
        for name in ("gradient_compression_ratio", "synchronization_interval_steps")
    )

    assert rare.performance == squeezed.performance


def test_one_device_has_nothing_to_compress():
    plain = ask(workload=TRAIN, engine="megatron")
    squeezed = ask(workload=TRAIN, engine="megatron", strategy={"gradient_compression_ratio": 4})

    assert squeezed.performance == plain.performance


def test_a_compressor_does_not_make_gradients_larger():
    with pytest.raises(ValidationError):
        exchanging(gradient_compression_ratio=0.5)


def test_rounding_the_weights_at_every_forward_takes_time_and_no_memory():
    plain = ask(workload=TRAIN, engine="deepspeed")
    rounded = ask(workload=TRAIN, engine="deepspeed", strategy={"quantization": "qat"})

    assert rounded.performance.step_seconds > plain.performance.step_seconds
    assert rounded.memory == plain.memory


def test_integer_states_take_a_byte_each():
    found = ask(workload={**TRAIN, "method": "qft"}, engine="deepspeed")

    assert held(found, "gradients") == held(found, "weights") == held(found, "optimizer_states")
    assert found.strategy.gradient_dtype == found.strategy.weight_dtype == "int8"


def test_scales_are_one_per_output_row():
    model = get_model(LLAMA_8B)
    rows = 2 * 4096 + 2 * 1024 + 2 * 14336 + 4096

    assert output_widths(model) == rows
    assert scale_parameters(num_layers=32, outputs=rows) == 32 * rows


def test_training_scales_alone_holds_hardly_any_states():
    scales = ask(workload={**TRAIN, "method": "alphatuning"}, engine="deepspeed")
    full = ask(workload=TRAIN, engine="deepspeed")

    assert scales.strategy.weight_dtype == "int4"
    assert held(scales, "optimizer_states") < held(full, "optimizer_states") / 1000
    assert held(scales, "adapters") == 2 * 32 * output_widths(get_model(LLAMA_8B))
