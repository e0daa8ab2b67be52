"""Memory: the published examples, and what each choice takes off or adds."""

import pytest

from planner.catalog.models import get_model
from planner.cost.kv_cache import kv_cache_bytes, layer_tokens
from planner.cost.parameters import count_parameters
from planner.cost.training import largest_weight, lora_parameters, sharded_state_bytes, zero_shards
from planner.cost.weights import stage_layers, weight_bytes_per_element
from tests.planner.asking import LLAMA_8B, LLAMA_70B, SERVE, TRAIN, ask, held

GIB = 1024**3


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_zero_papers_example_comes_out(stage, gigabytes):
    """7.5 B parameters on 64 devices: 2 + 2 + 12 bytes, arXiv:1910.02054 figure 1."""
    states = ((2.0, 3), (2.0, 2), (12.0, 1))
    held_bytes = sum(
        float(
            sharded_state_bytes(
                parameters=7.5e9, bytes_per_element=size, shards=zero_shards(stage, first, 64)
            )
        )
        for size, first in states
    )

    assert held_bytes / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(("dtype", "saved"), [("bf16", 0.5), ("int8", 0.75), ("int4", 0.867)])
def test_fewer_bits_save_what_the_guide_says_less_the_scales(dtype, saved):
    share = weight_bytes_per_element(dtype) / weight_bytes_per_element("fp32")

    assert 1 - share == pytest.approx(saved, abs=0.001)


def test_four_bits_in_groups_of_128_take_a_little_more_than_half_a_byte():
    assert weight_bytes_per_element("int4", 128) == 0.5 + 4 / 128


def test_nvfp4_carries_one_byte_of_scale_for_sixteen_weights():
    assert weight_bytes_per_element("nvfp4") == 0.5 + 1 / 16


def test_a_smaller_group_costs_more_scales():
    assert weight_bytes_per_element("int4", 32) > weight_bytes_per_element("int4", 128)


def test_weights_of_llama_8b_in_16_bits_are_two_bytes_a_parameter():
    parameters = count_parameters(get_model(LLAMA_8B)).total

    assert held(ask(), "weights") == 2 * parameters


def test_a_logged_vllm_start_has_the_same_weights_and_cache_blocks():
    """vLLM's log, Llama-3-8B on an A100-40GB: 14.96 GiB weights, 5,691 blocks in 11.12 GiB."""
    model = get_model("meta-llama/Meta-Llama-3-8B")
    block = kv_cache_bytes(
        num_kv_heads=model.num_key_value_heads,
        tensor_parallel_size=1,
        head_dim=model.head_dim,
        kv_bytes_per_element=2,
        num_layers=model.num_hidden_layers,
        num_tokens=16,
    )

    assert 2 * count_parameters(model).total / GIB == pytest.approx(14.96, abs=0.01)
    assert 5691 * block / GIB == pytest.approx(11.12, abs=0.01)


def test_kv_cache_is_tokens_times_the_bytes_of_a_token():
    found = ask(workload={**SERVE, "concurrency": 1, "input_tokens": 1024, "output_tokens": 1024})

    assert held(found, "kv_cache") == 2048 * 2 * 8 * 128 * 2 * 32


def test_more_ranks_than_kv_heads_replicate_heads_instead_of_splitting_them():
    eight = ask(model=LLAMA_70B, devices=8, strategy={"tensor_parallel_size": 8})
    sixteen = ask(model=LLAMA_70B, devices=16, strategy={"tensor_parallel_size": 16})

    assert held(eight, "kv_cache") == held(sixteen, "kv_cache")


def test_a_sliding_window_bounds_what_a_layer_keeps():
    model = get_model("google/gemma-2-9b")

    assert layer_tokens(model, 8192.0, paged=False).values == (21 * 4096, 21 * 8192)


def test_a_shared_prefix_is_kept_once():
    alone = ask(workload={**SERVE, "concurrency": 64})
    shared = ask(workload={**SERVE, "concurrency": 64, "prefix_share_ratio": 0.75})

    assert held(shared, "kv_cache") < 0.5 * held(alone, "kv_cache")


def test_an_eight_bit_cache_takes_half():
    wide = ask(strategy={"kv_cache_dtype": "bf16"})
    narrow = ask(strategy={"kv_cache_dtype": "fp8"})

    assert held(narrow, "kv_cache") * 2 == held(wide, "kv_cache")


def test_lora_on_gpt3_trains_ten_thousand_times_fewer_parameters():
    """Rank 4 on query and value of 96 layers of width 12,288: arXiv:2106.09685, table 4."""
    trained = lora_parameters(num_layers=96, rank=4, widths=2 * (12288 + 12288))

    assert 175e9 / float(trained) == pytest.approx(10_000, rel=0.1)


def test_lora_needs_a_third_of_the_memory_of_full_tuning():
    full = ask(devices=8, workload=TRAIN, engine="megatron")
    lora = ask(devices=8, workload={**TRAIN, "method": "lora"}, engine="megatron")

    assert 3 * lora.memory.per_device_peak_bytes < full.memory.per_device_peak_bytes


def test_full_tuning_with_adam_in_mixed_precision_takes_eighteen_bytes_a_parameter():
    found = ask(workload=TRAIN, engine="megatron")
    states = sum(held(found, name) for name in ("weights", "gradients", "optimizer_states"))

    assert states == 18 * count_parameters(get_model(LLAMA_8B)).total


def test_our_own_trainer_in_fp32_takes_sixteen_bytes_a_parameter():
    found = ask(workload=TRAIN)
    states = sum(held(found, name) for name in ("weights", "gradients", "optimizer_states"))

    assert states == 16 * count_parameters(get_model(LLAMA_8B)).total


def test_lomo_keeps_no_optimiser_states():
    found = ask(workload={**TRAIN, "method": "lomo"}, engine="megatron")

    assert held(found, "optimizer_states") == 0


@pytest.mark.parametrize(
    ("model", "elements"),
    [
        (LLAMA_8B, 128_256 * 4096),  # the vocabulary
        ("mistralai/Mixtral-8x7B-v0.1", 8 * 2 * 14_336 * 4096),  # all gates of a layer's experts
    ],
)
def test_a_fused_update_holds_the_gradient_of_the_largest_weight(model, elements):
    """LOMO, arXiv:2306.09782 section 3.2; a 262,144-element one was held as 1.05 MB in fp32."""
    assert largest_weight(get_model(model)) == elements

    found = ask(model=model, workload={**TRAIN, "method": "lomo"}, engine="megatron")

    assert held(found, "gradients") == pytest.approx(4 * elements)


def test_a_fused_update_divides_its_gradient_as_tensor_parallelism_divides_the_weight():
    method = {**TRAIN, "method": "lomo"}
    whole = ask(workload=method, engine="megatron")
    halves = ask(
        workload=method, engine="megatron", devices=2, strategy={"tensor_parallel_size": 2}
    )

    assert held(halves, "gradients") == pytest.approx(held(whole, "gradients") / 2, rel=0.01)


@pytest.mark.parametrize(
    ("engine", "dtype", "bytes_each"),
    [("megatron", "fp32", 4), ("megatron", "bf16", 4), ("torch", "fp32", 4), ("torch", "bf16", 6)],
)
def test_eager_attention_keeps_the_result_of_its_softmax(engine, dtype, bytes_each):
    """In fp32 that alone; in 16 bits the scores too, or ours in fp32 beside what products read."""
    options = {"compute_dtype": dtype, "micro_batch_size": 1}
    eager, flash = (
        term(ask(workload=TRAIN, engine=engine, strategy={**options, "attention": attention}))
        for attention in ("eager", "flash")
    )
    model, length = get_model(LLAMA_8B), TRAIN["sequence_length"]

    assert eager == pytest.approx(model.num_attention_heads * length**2 * bytes_each)
    assert flash == 0


def term(found):
    return sum(each.value for each in found.terms if each.key == "scores")


def test_recomputation_frees_activations():
    kept = ask(workload=TRAIN, strategy={"activation_recomputation": "none"})
    redone = ask(workload=TRAIN, strategy={"activation_recomputation": "full"})

    assert held(redone, "activations") < 0.5 * held(kept, "activations")


def test_eager_attention_keeps_scores_that_grow_with_the_square():
    def scores(length):
        workload = {**TRAIN, "sequence_length": length}
        return term(ask(workload=workload, strategy={"attention": "eager", "micro_batch_size": 1}))

    assert scores(4096) == pytest.approx(4 * scores(2048))


def test_offloaded_optimiser_states_move_to_the_host():
    offload = {"optimizer": "cpu"}
    near = ask(workload=TRAIN, engine="megatron")
    far = ask(workload=TRAIN, engine="megatron", strategy={"offload": offload})

    assert far.memory.host_bytes == held(near, "optimizer_states")
    assert held(far, "optimizer_states") == 0


def test_the_fullest_stage_is_the_answer():
    found = ask(model=LLAMA_70B, devices=4, strategy={"pipeline_parallel_size": 4})

    assert len(found.memory.per_stage_peak_bytes) == 4
    assert found.memory.per_device_peak_bytes == max(found.memory.per_stage_peak_bytes)


@pytest.mark.parametrize(("layers", "stages"), [(80, 4), (30, 4), (126, 16), (7, 7), (5, 2)])
def test_stages_hold_all_layers_and_differ_by_at_most_one(layers, stages):
    shares = stage_layers(layers, stages)

    assert sum(shares) == layers
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize(("layers", "stages"), [(61, 2), (7, 4), (126, 16)])
def test_no_stage_holds_fewer_layers_than_the_one_with_the_output_head(layers, stages):
    shares = stage_layers(layers, stages)

    assert shares[-1] == min(shares)
