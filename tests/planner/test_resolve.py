"""From a request to a setting: defaults are filled, contradictions are refused by name."""

import pytest

from planner.errors import BadRequestError, NotCoveredError, NotPossibleError
from tests.planner.asking import GENERATE, MIXTRAL, SERVE, TINY, TRAIN, ask


def test_the_answer_repeats_the_full_strategy():
    strategy = ask(devices=4, strategy={"tensor_parallel_size": 2}).strategy

    assert strategy.data_parallel_size == 2
    assert strategy.weight_dtype == "bf16"
    assert strategy.kv_cache_dtype == "bf16"


def test_a_quantised_checkpoint_is_served_as_published():
    strategy = ask(model="nvidia/Llama-3.1-8B-Instruct-FP8", engine="vllm").strategy

    assert (strategy.weight_dtype, strategy.activation_dtype) == ("fp8", "fp8")


def test_tensorrt_llm_keeps_an_eight_bit_cache_beside_eight_bit_weights():
    request = {"strategy": {"weight_dtype": "fp8"}}

    assert ask(**request, engine="tensorrt_llm").strategy.kv_cache_dtype == "fp8"
    assert ask(**request, engine="vllm").strategy.kv_cache_dtype == "bf16"


def test_our_own_runner_groups_four_bit_weights_by_sixty_four():
    assert ask(strategy={"weight_dtype": "int4"}).strategy.group_size == 64
    assert ask(strategy={"weight_dtype": "int4"}, engine="vllm").strategy.group_size == 128


def test_our_own_trainer_keeps_wide_weights_and_others_master_copies():
    assert ask(workload=TRAIN).strategy.weight_dtype == "fp32"
    assert ask(workload=TRAIN, engine="megatron").strategy.weight_dtype == "bf16"


def test_too_few_devices_are_refused_with_both_numbers():
    with pytest.raises(NotPossibleError, match=r"take 8 devices, the cluster has 4"):
        ask(devices=4, strategy={"tensor_parallel_size": 8})


def test_idle_devices_are_warned_about():
    found = ask(devices=4, strategy={"tensor_parallel_size": 1, "data_parallel_size": 1})

    assert "3 of 4 devices stay unused" in found.warnings


def test_ranks_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(NotPossibleError, match="must divide the 32 attention heads"):
        ask(devices=3, strategy={"tensor_parallel_size": 3})


def test_more_stages_than_layers_are_refused():
    with pytest.raises(NotPossibleError, match="only 6 layers"):
        ask(model=TINY, devices=8, strategy={"pipeline_parallel_size": 8})


def test_experts_of_a_dense_model_are_refused():
    with pytest.raises(NotPossibleError, match="dense"):
        ask(devices=2, strategy={"expert_parallel_size": 2, "tensor_parallel_size": 2})


def test_experts_that_do_not_divide_are_refused():
    strategy = {"expert_parallel_size": 3, "tensor_parallel_size": 4}

    with pytest.raises(NotPossibleError, match="must divide the 8 experts"):
        ask(model=MIXTRAL, devices=4, strategy=strategy)


def test_a_device_without_any_published_peak_is_refused_by_name():
    device = {"id": "my-chip", "memory_bytes": 2**36, "memory_bandwidth_bytes_per_second": 1e12}

    with pytest.raises(BadRequestError, match="my-chip"):
        ask(device=device)


def test_a_dtype_without_its_own_units_runs_at_the_next_wider_ones():
    fp8 = ask(device="a100", strategy={"weight_dtype": "fp8"}, engine="vllm")
    bf16 = ask(device="a100", engine="vllm")

    assert fp8.performance.prefill_seconds == pytest.approx(
        bf16.performance.prefill_seconds, rel=0.1
    )


def test_a_cluster_may_override_the_links_of_its_device():
    base = {"device": "h100", "devices_per_node": 8}
    slow = {**base, "intra_node_bandwidth_bytes_per_second": 10e9}
    strategy = {"tensor_parallel_size": 8}

    near = ask(cluster=base, strategy=strategy).performance
    far = ask(cluster=slow, strategy=strategy).performance

    assert far.prefill_seconds > near.prefill_seconds


@pytest.mark.parametrize("name", ["kv_cpu", "kv_disk"])
def test_a_share_that_training_would_ignore_is_refused_by_name(name):
    with pytest.raises(NotCoveredError, match=rf"offload\.{name} is 0.5: .* when training"):
        ask(workload=TRAIN, devices=8, strategy={"offload": {name: 0.5}})


@pytest.mark.parametrize("workload", [SERVE, GENERATE])
def test_optimiser_states_are_not_moved_where_there_are_none(workload):
    with pytest.raises(NotCoveredError, match=r"offload\.optimizer is 'cpu'"):
        ask(workload=workload, strategy={"offload": {"optimizer": "cpu"}})


def test_an_offload_that_moves_nothing_is_taken_everywhere():
    nothing = {"offload": {"weights_cpu": 0.0, "optimizer": "none"}}

    assert ask(workload=TRAIN, devices=8, strategy=nothing).strategy.offload is not None
    assert ask(workload=GENERATE, strategy=nothing).fits
