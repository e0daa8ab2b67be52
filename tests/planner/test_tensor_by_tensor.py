"""Bytes of weights, caches and states against a list of every tensor, cut rank by rank."""

import itertools

import pytest

from planner.catalog.models import get_model
from planner.cost.parameters import count_parameters
from tests.planner.asking import LLAMA_8B, LLAMA_70B, LLAMA_405B, MIXTRAL, ask, held
from tests.planner.tensors import all_tensors, bytes_on_a_rank, cached_bytes

WITHOUT_BIASES = [
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_405B,
    MIXTRAL,
    "meta-llama/Llama-3.2-1B",
    "mistralai/Mistral-7B-v0.1",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-30B-A3B",
    "google/gemma-2b",
]
FOUR_GIB = 4 * 1024**3
BIG = {
    "id": "roomy",
    "memory_bytes": 2**42,
    "memory_bandwidth_bytes_per_second": 3e12,
    "peak_flops_per_second": {"bf16": 1e15, "fp8": 2e15, "int8": 2e15},
    "intra_node_bandwidth_bytes_per_second": 450e9,
}
SERVE = {"kind": "serve", "input_tokens": 1000, "output_tokens": 24, "concurrency": 16}
STEP = {"kind": "train", "sequence_length": 2048, "global_batch_size": 16, "method": "full"}


def tensor_sizes(model_id):
    model = get_model(model_id)
    return [
        ranks
        for ranks in (1, 2, 4, 8, 16)
        if model.num_attention_heads % ranks == 0
        and max(model.num_key_value_heads, ranks) % min(model.num_key_value_heads, ranks) == 0
    ]


CASES = [(model, ranks) for model in WITHOUT_BIASES for ranks in tensor_sizes(model)]


def on_ranks(model, ranks, workload, **strategy):
    layout = {"tensor_parallel_size": ranks, "data_parallel_size": 1, **strategy}
    return ask(model=model, device=BIG, devices=16, workload=workload, strategy=layout)


def test_the_tensors_of_a_checkpoint_add_up_to_the_parameters():
    for model in WITHOUT_BIASES:
        spec = get_model(model)
        listed = sum(tensor.elements for tensor in all_tensors(spec))
        assert count_parameters(spec).total == listed, model


def test_a_rank_holds_its_cut_of_every_weight():
    wrong = []
    for model, ranks in CASES:
        found = on_ranks(model, ranks, SERVE, weight_dtype="bf16")
        listed = bytes_on_a_rank(get_model(model), ranks, 2)
        if held(found, "weights") != pytest.approx(listed, rel=1e-6):
            wrong.append((model, ranks, held(found, "weights")))
    assert not wrong, wrong


def test_a_rank_caches_whole_heads_of_every_token():
    wrong = []
    for model, ranks in CASES:
        spec = get_model(model)
        if any(group.window for group in spec.layers_by_attention):
            spec = spec.model_copy(
                update={"attention_layers": ()}
            )  # windows have tests of their own
        found = on_ranks(spec.model_dump(exclude_none=True), ranks, SERVE, weight_dtype="bf16")
        # 1,000 + 24 tokens are 64 whole pages of 16, so that paging adds nothing.
        listed = cached_bytes(spec, [1024] * 16, ranks, 2)
        if held(found, "kv_cache") != pytest.approx(listed, rel=0.02):
            wrong.append((model, ranks, held(found, "kv_cache")))
    assert not wrong, wrong


def test_zero_divides_what_its_stage_shards_and_nothing_else():
    """Sixteen devices: weights in bf16, gradients in fp32, two moments and a master in fp32."""
    for model, ranks, stage in itertools.product(
        (LLAMA_8B, LLAMA_70B, "Qwen/Qwen3-8B"), (1, 2, 4, 8), (0, 1, 2, 3)
    ):
        data = 16 // ranks
        found = ask(
            model=model,
            device=BIG,
            devices=16,
            workload=STEP,
            engine="megatron",
            strategy={
                "tensor_parallel_size": ranks,
                "data_parallel_size": data,
                "zero_stage": stage,
                "weight_dtype": "bf16",
                "gradient_dtype": "fp32",
            },
        )

        elements = bytes_on_a_rank(get_model(model), ranks, 1)
        shards = [data if stage >= first else 1 for first in (1, 2, 3)]
        assert held(found, "optimizer_states") == pytest.approx(
            12 * elements / shards[0], rel=1e-6
        )
        assert held(found, "gradients") == pytest.approx(4 * elements / shards[1], rel=1e-6)
        assert held(found, "weights") == pytest.approx(2 * elements / shards[2], rel=1e-6)


def test_the_stages_of_a_pipeline_hold_every_weight_once():
    for model in (LLAMA_8B, LLAMA_70B, MIXTRAL):
        spec = get_model(model)
        whole = sum(tensor.elements for tensor in all_tensors(spec)) * 2
        stages = 4

        piped = ask(
            model=model,
            device=BIG,
            devices=stages,
            workload=SERVE,
            strategy={"pipeline_parallel_size": stages, "weight_dtype": "bf16"},
        )

        assert whole / stages < held(piped, "weights") < whole / stages * 1.2, model


def test_a_narrow_type_shrinks_matrices_but_no_norm_and_no_vocabulary():
    spec = get_model(LLAMA_8B)
    for dtype, bytes_each in (("bf16", 2), ("fp8", 1), ("int8", 1)):
        matrices = sum(
            t.elements for t in all_tensors(spec) if ".attention" in t.name or ".mlp" in t.name
        )
        rest = sum(t.elements for t in all_tensors(spec)) - matrices
        found = on_ranks(LLAMA_8B, 1, SERVE, weight_dtype=dtype)
        scales = 0.01 * matrices if bytes_each < 2 else 0
        exact = matrices * bytes_each + rest * 2
        assert exact - 1 <= held(found, "weights") <= exact + scales, (dtype, bytes_each)
