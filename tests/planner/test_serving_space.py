"""The space of serving: every open choice is in it, and each cell costs what it costs alone."""

from functools import cache

import pytest

from planner.api import plan
from planner.search.question import questions
from planner.search.scoring import score
from planner.search.serving_space import serving_blocks
from planner.specs.estimate import PlanRequest
from tests.planner.asking import GENERATE, LLAMA_8B, LLAMA_70B, LLAMA_405B, SERVE, document

SPARSE_MODEL = "Qwen/Qwen3-235B-A22B-FP8"
LONG = {**SERVE, "input_tokens": 100_000, "concurrency": 1}
SPACES = {
    "dense": (LLAMA_8B, 4, SERVE, {}),
    "sparse": (SPARSE_MODEL, 4, SERVE, {"pins": {"pipeline_parallel_size": 1}}),
    "open": (LLAMA_70B, 2, {**SERVE, "concurrency": None, "request_rate_per_second": 3}, {}),
    "long": (LLAMA_8B, 4, LONG, {}),
    "offline": (LLAMA_8B, 2, {**GENERATE, "batch_size": 32}, {}),
    "frugal": (LLAMA_8B, 4, SERVE, {"objective": "cost"}),
    "one copy": (LLAMA_8B, 4, SERVE, {"pins": {"data_parallel_size": 1}}),
}
FIGURES = ("tokens_per_second", "latency_seconds", "ttft_seconds", "tpot_seconds")


def request_of(model, devices, workload, other):
    fields = {"engine": "vllm", "device": "h200-sxm-141gb", **other}
    return PlanRequest.model_validate(
        document(model=model, devices=devices, workload=workload, **fields)
    )


@cache
def blocks_of(name):
    request = request_of(*SPACES[name])
    (question,) = questions(request)
    return serving_blocks(question, request.workload)


def strategies(name):
    return [block.strategy(row) for block in blocks_of(name) for row in range(len(block.cells))]


@pytest.mark.parametrize("name", SPACES)
def test_every_cell_of_a_block_costs_what_its_strategy_costs_alone(name):
    for block in blocks_of(name)[::2]:
        scores = score(block)
        for row in range(0, len(scores), 5):
            alone = scores.exact(row)
            assert bool(scores.fits[row]) == alone.fits
            for figure in FIGURES:
                column = scores.figures(figure)
                assert column[row] == pytest.approx(getattr(alone.performance, figure), rel=1e-9)
            peak = scores.figures("per_device_peak_bytes")[row]
            assert peak == pytest.approx(alone.memory.per_device_peak_bytes, abs=1)


@pytest.mark.parametrize("name", SPACES)
def test_no_strategy_is_in_the_space_twice(name):
    written = [strategy.model_dump_json() for strategy in strategies(name)]

    assert len(set(written)) == len(written)


def test_a_sparse_model_may_split_experts_and_attention_in_every_way():
    found = {
        (s.tensor_parallel_size, s.attention_data_parallel_size or 1, s.expert_parallel_size)
        for s in strategies("sparse")
        if s.data_parallel_size == 1
    }

    # vLLM spreads the experts over all ranks, or cuts all of them.
    assert {(4, 1, 1), (4, 1, 4), (2, 2, 4), (1, 4, 4)} <= found
    assert all(experts in {1, tensor * ranks} for tensor, ranks, experts in found)


def test_a_dense_model_has_neither_expert_nor_attention_ranks():
    fields = {name for s in strategies("dense") for name, value in s if value is not None}

    assert not {"expert_parallel_size", "attention_data_parallel_size"} & fields


def test_a_very_long_prompt_may_be_split_over_ranks_and_cut_into_chunks():
    found = strategies("long")

    assert {s.context_parallel_size for s in found} == {None}  # vLLM has no flag for more
    assert {s.max_batch_tokens for s in found if s.chunked_prefill} >= {2048, 8192}


def test_a_single_copy_that_saves_nothing_leaves_no_device_idle():
    sizes = {s.tensor_parallel_size * s.pipeline_parallel_size for s in strategies("one copy")}

    assert sizes == {4}


def test_saving_objectives_may_leave_devices_idle():
    sizes = {s.data_parallel_size * s.tensor_parallel_size for s in strategies("frugal")}

    assert 1 in sizes


@pytest.mark.parametrize(
    "pins",
    [
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2, "weight_dtype": "int8"},
        {"quantization": "gptq"},
        {"max_batch_tokens": 2048},
        {"weight_dtype": "nf4"},
        {"kv_cache_dtype": "fp8", "chunked_prefill": True},
    ],
    ids="-".join,
)
def test_pinned_fields_keep_their_value_and_the_rest_stays_open(pins):
    answer = plan(request_of(LLAMA_8B, 4, SERVE, {"pins": pins}))

    for offered in answer.plans:
        assert {name: getattr(offered.strategy, name) for name in pins} == pins
    assert answer.searched.strategies > 1


def test_blocks_that_cannot_be_costed_leave_the_others():
    """A draft model cannot be split into stages: layouts without stages are still offered."""
    pins = {"speculative": {"draft_model": LLAMA_8B, "tokens": 4, "acceptance_ratio": 0.7}}
    answer = plan(request_of(LLAMA_70B, 4, SERVE, {"pins": pins}))

    assert {offered.strategy.pipeline_parallel_size for offered in answer.plans} == {1}


@pytest.mark.parametrize("devices", [8, 64])
def test_serving_405b_is_planned_and_says_how_long_it_searched(devices):
    cluster = {"device": "h200-sxm-141gb", "devices_per_node": 8, "nodes": devices // 8}
    request = PlanRequest.model_validate(
        {"model": LLAMA_405B, "cluster": cluster, "workload": SERVE, "engine": "vllm"}
    )

    answer = plan(request)

    assert answer.plans
    assert answer.searched.seconds > 0  # how few: `manage.py bench planner`
