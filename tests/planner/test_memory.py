"""Memory: the published examples, and what each choice takes off or adds."""

import pytest

from planner.catalog.models import get_model
from planner.cost.kv_cache import cached_tokens_by_layer_group, kv_cache_bytes
from planner.cost.parameters import count_parameters
from planner.cost.training import largest_weight, lora_parameters, sharded_state_bytes, zero_shards
from planner.cost.weights import stage_layers, weight_bytes_per_element
from tests.planner.asking import LLAMA_8B, LLAMA_70B, SERVE, TRAIN, ask, held

GIB = 1024**3


def test_published_bytes_of_states_and_weights_come_out():
    # The ZeRO paper's example comes out: 7.5 B parameters on 64 devices: 2 + 2 + 12 bytes,
    # arXiv:1910.02054 figure 1.
    for stage, gigabytes in [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)]:
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

    # Fewer bits save what the guide says less the scales.
    for dtype, saved in [("bf16", 0.5), ("int8", 0.75), ("int4", 0.867)]:
        share = weight_bytes_per_element(dtype) / weight_bytes_per_element("fp32")
        assert 1 - share == pytest.approx(saved, abs=0.001)
    # Four bits in groups of 128 take a little more than half a byte.
    assert weight_bytes_per_element("int4", 128) == 0.5 + 4 / 128
    # NVFP4 carries one byte of scale for sixteen weights.
    assert weight_bytes_per_element("nvfp4") == 0.5 + 1 / 16
    # A smaller group costs more scales.
    assert weight_bytes_per_element("int4", 32) > weight_bytes_per_element("int4", 128)
    # Weights of Llama 8B in 16 bits are two bytes a parameter.
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


def test_a_cache_is_tokens_times_the_bytes_of_a_token():
    found = ask(workload={**SERVE, "concurrency": 1, "input_tokens": 1024, "output_tokens": 1024})
    assert held(found, "kv_cache") == 2048 * 2 * 8 * 128 * 2 * 32
    # More ranks than kv heads replicate heads instead of splitting them.
    eight = ask(model=LLAMA_70B, devices=8, strategy={"tensor_parallel_size": 8})
    sixteen = ask(model=LLAMA_70B, devices=16, strategy={"tensor_parallel_size": 16})
    assert held(eight, "kv_cache") == held(sixteen, "kv_cache")
    # A sliding window bounds what a layer keeps.
    model = get_model("google/gemma-2-9b")
    assert cached_tokens_by_layer_group(model, 8192.0, paged=False).values == (
        21 * 4096,
        21 * 8192,
    )
    # A shared prefix is kept once.
    alone = ask(workload={**SERVE, "concurrency": 64})
    shared = ask(workload={**SERVE, "concurrency": 64, "prefix_share_ratio": 0.75})
    assert held(shared, "kv_cache") < 0.5 * held(alone, "kv_cache")
    # An eight bit cache takes half.
    wide = ask(strategy={"kv_cache_dtype": "bf16"})
    narrow = ask(strategy={"kv_cache_dtype": "fp8"})
    assert held(narrow, "kv_cache") * 2 == held(wide, "kv_cache")


def test_lora_trains_few_parameters_in_a_third_of_the_memory():
    # LoRA on GPT-3 trains ten thousand times fewer parameters: Rank 4 on query and value of 96
    # layers of width 12,288: arXiv:2106.09685, table 4.
    trained = lora_parameters(num_layers=96, rank=4, widths=2 * (12288 + 12288))
    assert 175e9 / float(trained) == pytest.approx(10_000, rel=0.1)
    # LoRA needs a third of the memory of full tuning.
    full = ask(devices=8, workload=TRAIN, engine="megatron")
    lora = ask(devices=8, workload={**TRAIN, "method": "lora"}, engine="megatron")
    assert 3 * lora.memory.per_device_peak_bytes < full.memory.per_device_peak_bytes


def test_training_states_take_the_bytes_of_their_method():
    # Adam in mixed precision takes eighteen bytes a parameter, our own trainer in fp32 sixteen.
    parameters = count_parameters(get_model(LLAMA_8B)).total
    near, own = ask(workload=TRAIN, engine="megatron"), ask(workload=TRAIN)
    for found, each in ((near, 18), (own, 16)):
        states = sum(held(found, name) for name in ("weights", "gradients", "optimizer_states"))
        assert states == each * parameters

    # LOMO keeps no optimiser states.
    found = ask(workload={**TRAIN, "method": "lomo"}, engine="megatron")
    assert held(found, "optimizer_states") == 0
    # Offloaded optimiser states move to the host.
    far = ask(workload=TRAIN, engine="megatron", strategy={"offload": {"optimizer": "cpu"}})
    assert far.memory.host_bytes == held(near, "optimizer_states")
    assert held(far, "optimizer_states") == 0


def test_a_fused_update_holds_the_gradient_of_the_largest_weight():
    # LOMO, arXiv:2306.09782 section 3.2; a 262,144-element one was held as 1.05 MB in fp32.
    for model, elements in [
        (LLAMA_8B, 128_256 * 4096),  # the vocabulary
        ("mistralai/Mixtral-8x7B-v0.1", 8 * 2 * 14_336 * 4096),  # all gates of a layer's experts
    ]:
        assert largest_weight(get_model(model)) == elements
        found = ask(model=model, workload={**TRAIN, "method": "lomo"}, engine="megatron")
        assert held(found, "gradients") == pytest.approx(4 * elements)

    # A fused update divides its gradient as tensor parallelism divides the weight.
    method = {**TRAIN, "method": "lomo"}
    whole = ask(workload=method, engine="megatron")
    halves = ask(
        workload=method, engine="megatron", devices=2, strategy={"tensor_parallel_size": 2}
    )
    assert held(halves, "gradients") == pytest.approx(held(whole, "gradients") / 2, rel=0.01)


def test_eager_attention_keeps_scores_that_grow_with_the_square():
    # Eager attention keeps the result of its softmax: In fp32 that alone; in 16 bits the scores
    # too, or ours in fp32 beside what products read.
    for engine, dtype, bytes_each in [
        ("megatron", "fp32", 4),
        ("megatron", "bf16", 4),
        ("torch", "fp32", 4),
        ("torch", "bf16", 6),
    ]:
        options = {"compute_dtype": dtype, "micro_batch_size": 1}
        eager, flash = (
            term(ask(workload=TRAIN, engine=engine, strategy={**options, "attention": attention}))
            for attention in ("eager", "flash")
        )
        model, length = get_model(LLAMA_8B), TRAIN["sequence_length"]
        assert eager == pytest.approx(model.num_attention_heads * length**2 * bytes_each)
        assert flash == 0

    def scores(length):
        workload = {**TRAIN, "sequence_length": length}
        return term(ask(workload=workload, strategy={"attention": "eager", "micro_batch_size": 1}))

    assert scores(4096) == pytest.approx(4 * scores(2048))
    # Recomputation frees activations.
    kept = ask(workload=TRAIN, strategy={"activation_recomputation": "none"})
    redone = ask(workload=TRAIN, strategy={"activation_recomputation": "full"})
    assert held(redone, "activations") < 0.5 * held(kept, "activations")


def term(found):
    return sum(each.value for each in found.terms if each.key == "scores")


def test_stages_hold_all_layers_and_differ_by_at_most_one():
    for layers, stages in [(80, 4), (30, 4), (126, 16), (7, 7), (5, 2)]:
        shares = stage_layers(layers, stages)
        assert sum(shares) == layers
        assert max(shares) - min(shares) <= 1

    # No stage holds fewer layers than the one with the output head.
    for layers, stages in [(61, 2), (7, 4), (126, 16)]:
        shares = stage_layers(layers, stages)
        assert shares[-1] == min(shares)
