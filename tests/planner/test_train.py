"""Training: FLOP per token, pipelines, exchange, recomputation, and our own trainer."""

import pytest

from planner.catalog.models import get_model
from planner.cost.parameters import count_parameters
from planner.errors import NotPossibleError
from tests.planner.asking import CPU, LLAMA_8B, TINY, TRAIN, ask


def training(devices=8, method="full", **strategy):
    return ask(
        devices=devices, workload={**TRAIN, "method": method}, strategy=strategy, engine="megatron"
    )


def test_flop_per_token_are_six_times_the_parameters_and_the_attention():
    found = training()
    parameters = count_parameters(get_model(LLAMA_8B)).total
    per_token = (
        found.performance.model_flops_per_second_per_device
        * 8
        / found.performance.tokens_per_second
    )

    assert per_token / (6 * parameters) == pytest.approx(1.0, abs=0.1)


def test_tokens_per_second_times_the_step_are_the_tokens_of_the_step():
    found = training().performance

    assert found.tokens_per_second * found.step_seconds == pytest.approx(16 * 2048)


def test_utilisation_is_a_share():
    assert 0.2 < training().performance.mfu < 1.0


def test_a_pipeline_has_a_bubble_that_more_micro_batches_shrink():
    few = training(pipeline_parallel_size=4, data_parallel_size=2, micro_batch_size=4)
    many = training(pipeline_parallel_size=4, data_parallel_size=2, micro_batch_size=1)

    assert few.performance.bubble_ratio > many.performance.bubble_ratio > 0
    assert training().performance.bubble_ratio == 0


def test_a_bubble_is_p_minus_one_micro_batches():
    """With m micro-batches on p stages the bubble is (p-1)/(m+p-1) of the pipelined part.

    A little less here: the last stage holds the head, and an exchange and an update follow.
    """
    found = training(pipeline_parallel_size=4, data_parallel_size=2, micro_batch_size=1)

    assert found.performance.bubble_ratio == pytest.approx(3 / (8 + 3), rel=0.2)


def test_full_recomputation_costs_a_third_more_arithmetic_of_the_layers():
    """The product with the vocabulary, 6.9 % of the parameters, runs forward once."""
    kept = training(activation_recomputation="none").time_breakdown_seconds["train_step"]
    redone = training(activation_recomputation="full").time_breakdown_seconds["train_step"]

    assert redone["compute"] / kept["compute"] == pytest.approx(4 / 3, rel=0.02)


def test_adapters_skip_the_gradients_of_frozen_weights():
    full = training().time_breakdown_seconds["train_step"]
    lora = training(method="lora").time_breakdown_seconds["train_step"]

    assert lora["compute"] / full["compute"] == pytest.approx(2 / 3)


def test_one_data_rank_exchanges_nothing():
    found = ask(workload=TRAIN, engine="megatron")

    assert found.performance.communication_ratio == 0


def test_slow_links_expose_the_exchange_of_gradients():
    cluster = {"device": "h100", "devices_per_node": 1, "nodes": 8}
    slow = {**cluster, "inter_node_bandwidth_bytes_per_second": 1e9}
    near = ask(cluster=cluster, workload=TRAIN, engine="megatron")
    far = ask(cluster=slow, workload=TRAIN, engine="megatron")

    assert far.performance.communication_ratio > near.performance.communication_ratio


def test_the_length_of_a_run_gives_its_duration():
    tokens = 16 * 2048 * 100
    found = ask(devices=8, workload={**TRAIN, "tokens": tokens}, engine="megatron").performance

    assert found.duration_seconds == pytest.approx(100 * found.step_seconds)


def test_our_own_trainer_takes_the_whole_batch_at_once_unless_told():
    found = ask(model=TINY, device=CPU, workload={**TRAIN, "sequence_length": 256})

    assert found.strategy.micro_batch_size == 16
    assert found.strategy.gradient_accumulation_steps == 1


def test_autocast_keeps_wide_weights_and_narrow_activations():
    workload = {**TRAIN, "sequence_length": 256, "global_batch_size": 8}
    wide = ask(model=TINY, device=CPU, workload=workload, strategy={"compute_dtype": "fp32"})
    mixed = ask(model=TINY, device=CPU, workload=workload, strategy={"compute_dtype": "bf16"})

    weights = (wide.memory.breakdown_bytes["weights"], mixed.memory.breakdown_bytes["weights"])
    assert weights[0] == weights[1]
    assert mixed.memory.breakdown_bytes["activations"] < wide.memory.breakdown_bytes["activations"]
    assert mixed.memory.breakdown_bytes["buffers"] > 0


def test_a_batch_that_does_not_divide_is_refused_with_its_numbers():
    with pytest.raises(NotPossibleError, match="global_batch_size is 16"):
        training(devices=3, data_parallel_size=3)


def test_a_micro_batch_that_does_not_divide_is_refused_with_its_numbers():
    with pytest.raises(NotPossibleError, match="micro_batch_size is 3"):
        training(micro_batch_size=3, data_parallel_size=1)
