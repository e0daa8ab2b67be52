"""Layouts of serving: their space and grids cost what each layout costs alone."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.api import plan
from planner.catalog.models import get_model
from planner.cost.quantity import Ledger, NullLedger
from planner.search.question import questions
from planner.search.scoring import score
from planner.search.serving_space import serving_blocks
from planner.specs.base import NotCoveredError, NotPossibleError
from planner.specs.estimate import EstimateRequest, PlanRequest
from planner.workload.costing import cost_workload
from planner.workload.forward import further_operators
from planner.workload.resolve import resolve
from tests.planner.asking import (
    GENERATE,
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_405B,
    SERVE,
    TRAIN,
    ask,
    document,
    held,
)

SPARSE_MODEL = "Qwen/Qwen3-235B-A22B"
FEW = {**SERVE, "concurrency": 4}
MANY = {**SERVE, "concurrency": 256}
LONG = {**SERVE, "input_tokens": 64_000, "concurrency": 1}


def sparse(workload=MANY, devices=8, **strategy):
    sizes = {f"{name}_size": size for name, size in strategy.items()}
    return ask(
        model=SPARSE_MODEL, devices=devices, workload=workload, strategy=sizes, engine="vllm"
    )


def terms(found, name, group="decode"):
    return [term.value for term in found.terms if term.name == name and term.group == group]


def test_whole_experts_exchange_nothing_fall_unevenly_and_take_the_same_memory():
    # A peer charges an all-to-all although the ranks hold the same tokens.
    cut = sparse(tensor_parallel=8)
    whole = sparse(tensor_parallel=8, expert_parallel=8)
    assert not terms(whole, "Expert all-to-all")
    assert terms(cut, "Tensor-parallel all-reduces") == terms(whole, "Tensor-parallel all-reduces")

    cut = sparse(FEW, tensor_parallel=8)
    whole = sparse(FEW, tensor_parallel=8, expert_parallel=8)
    assert terms(whole, "Experts")[0] > 1.3 * terms(cut, "Experts")[0]

    cut = sparse(tensor_parallel=8)
    whole = sparse(tensor_parallel=8, expert_parallel=8)
    assert held(cut, "weights") == held(whole, "weights")


def test_attention_by_request_splits_the_cache_exchanges_tokens_and_gives_a_rank_each():
    # Four KV heads over eight ranks are kept twice; by request they are kept once.
    some = {**SERVE, "concurrency": 64}
    tensor = sparse(some, tensor_parallel=8, expert_parallel=8)
    data = sparse(some, tensor_parallel=1, attention_data_parallel=8, expert_parallel=8)
    assert held(data, "kv_cache") == pytest.approx(held(tensor, "kv_cache") / 2, rel=0.01)
    assert held(data, "weights") > held(tensor, "weights")

    found = sparse(tensor_parallel=1, attention_data_parallel=8, expert_parallel=8)
    assert terms(found, "Expert all-to-all")[0] > 0
    assert terms(found, "Tensor-parallel all-reduces") == [0.0]

    alone = {**SERVE, "concurrency": 1}
    one, four = (
        sparse(workload, attention_data_parallel=8, expert_parallel=8) for workload in (alone, FEW)
    )

    assert terms(one, "Attention and KV-cache reads") == terms(
        four, "Attention and KV-cache reads"
    )


def test_other_ways_of_counting_the_same_ranks_are_understood():
    ours = sparse(tensor_parallel=1, attention_data_parallel=8, expert_parallel=8)
    for written in (
        {"tensor_parallel": 8, "attention_data_parallel": 8, "expert_parallel": 8},
        {"tensor_parallel": 1, "data_parallel": 8, "expert_parallel": 8},
    ):
        found = sparse(**written)
        assert found.strategy == ours.strategy, written
        assert found.performance == ours.performance, written


def test_experts_that_do_not_divide_their_ranks_are_refused():
    strategy = {"tensor_parallel_size": 8, "expert_parallel_size": 16, "data_parallel_size": 3}
    with pytest.raises(NotPossibleError, match="must divide the 8 ranks"):
        ask(model=SPARSE_MODEL, devices=24, strategy=strategy)


def test_attention_data_ranks_count_as_devices():
    with pytest.raises(NotPossibleError, match="4 attention ranks take 64 devices"):
        sparse(tensor_parallel=8, data_parallel=1, attention_data_parallel=4, pipeline_parallel=2)


def test_a_long_prompt_is_read_faster_by_more_context_ranks():
    layout = {"tensor_parallel_size": 4}
    one = ask(model=LLAMA_70B, devices=4, workload=LONG, strategy=layout, engine="tensorrt_llm")
    two = ask(
        model=LLAMA_70B,
        devices=8,
        workload=LONG,
        strategy={**layout, "context_parallel_size": 2},
        engine="tensorrt_llm",
    )

    assert 0.45 < two.performance.prefill_seconds / one.performance.prefill_seconds < 0.75
    assert held(two, "kv_cache") == pytest.approx(held(one, "kv_cache") / 2)
    assert held(two, "weights") == held(one, "weights")


def test_context_ranks_exchange_queries_when_they_decode():
    strategy = {"tensor_parallel_size": 1, "context_parallel_size": 4}
    found = ask(devices=4, workload=LONG, strategy=strategy, engine="tensorrt_llm")
    assert terms(found, "Context-parallel exchange")[0] > 0


def test_splits_that_engine_or_phase_do_not_have_are_refused():
    strategy = {"tensor_parallel_size": 1, "context_parallel_size": 4}
    for engine in ("vllm", "sglang", "llama_cpp"):
        with pytest.raises(NotPossibleError, match="context_parallel_size is 4") as refused:
            ask(devices=4, workload=LONG, strategy=strategy, engine=engine)
        assert refused.value.field == "strategy.context_parallel_size", engine

    with pytest.raises(NotCoveredError, match="which inference uses"):
        ask(workload=TRAIN, devices=2, strategy={"attention_data_parallel_size": 2})

    with pytest.raises(NotCoveredError, match="which training uses"):
        ask(devices=2, strategy={"virtual_pipeline_size": 2, "pipeline_parallel_size": 2})


def test_a_shared_prefix_is_attended_to_not_computed_and_kept_once():
    # Prefill of s tokens after a cached prefix p: the pairs of s + p without those of p.
    whole = ask(workload=FEW, engine="vllm")
    shared = ask(workload={**FEW, "prefix_share_ratio": 0.5}, engine="vllm")
    name = "Attention: arithmetic"
    n = FEW["input_tokens"]
    pairs = (n * (n + 1) - n / 2 * (n / 2 + 1)) / (n * (n + 1))

    found = terms(shared, name, "prefill")[0] / terms(whole, name, "prefill")[0]
    assert found == pytest.approx(pairs)

    own = ask(workload=MANY, engine="vllm")
    shared = ask(workload={**MANY, "prefix_share_ratio": 0.5}, engine="vllm")
    assert 0.5 < held(shared, "kv_cache") / held(own, "kv_cache") < 0.58


def test_layers_with_more_operators_take_longer_to_issue():
    """Routers, shared experts and latent attention launch kernels that a dense layer has not."""
    dense = get_model(LLAMA_70B)
    latent = get_model("deepseek-ai/DeepSeek-R1")
    assert further_operators(dense) == 0
    assert further_operators(latent) == 58 * (4 + 3) + 61 * 6
    assert terms(sparse(), "Further kernel launches")[0] > 0


SLIDING_MODEL = "google/gemma-2-27b-it"
POOLED_MODEL = "deepseek-ai/DeepSeek-V4-Flash"
AXES = {
    "data": (1, 2, 4),
    "tensor": (1, 2, 8),
    "attention_data": (1, 4),
    "context": (1, 2),
    "batch_tokens": (512, 8192),
    "pipeline": (1, 3, 4),
    "chunked": (False, True),
    "cache_element_bytes": (1.0, 2.0),
}
FIGURES = (
    "ttft_seconds", "tpot_seconds", "latency_seconds", "tokens_per_second",
    "tokens_per_second_per_device", "max_concurrency", "communication_ratio",
)  # fmt: skip
WORKLOADS = (
    {**SERVE, "concurrency": 3},
    {**SERVE, "concurrency": 4000, "prefix_share_ratio": 0.4},
    {**SERVE, "concurrency": None},
    {**SERVE, "concurrency": None, "request_rate_per_second": 2.0},
    {**SERVE, "concurrency": None, "request_rate_per_second": 500.0},
    {**GENERATE, "batch_size": 64},
)


@cache
def setting_of(model, workload, engine):
    strategy = {"weight_dtype": "fp8"}
    request = {
        "model": model,
        "cluster": {"device": "h200-sxm-141gb", "devices_per_node": 8, "nodes": 128},
        "workload": WORKLOADS[workload],
        "strategy": strategy,
        "engine": engine,
    }
    return resolve(EstimateRequest.model_validate(request))


def laid_out(setting, **sizes):
    expert = sizes["tensor"] if setting.model.is_moe else 1
    return replace(setting, layout=replace(setting.layout, expert=expert, **sizes))


def columns_of():
    """Return each axis along its own dimension, so that all of them make a grid."""
    count = len(AXES)
    return {
        name: np.array(values, dtype=float).reshape(
            [-1 if at == own else 1 for at in range(count)]
        )
        for own, (name, values) in enumerate(AXES.items())
    }


CHOICES = st.tuples(
    st.sampled_from((LLAMA_70B, SPARSE_MODEL, SLIDING_MODEL, POOLED_MODEL)),
    st.integers(0, len(WORKLOADS) - 1),
    st.sampled_from(("vllm", "vllm 0.9", "vllm 0.14", "vllm 0.22", "tensorrt_llm", "torch")),
)


@settings(max_examples=40, deadline=None)
@given(choices=CHOICES, cell=st.tuples(*(st.integers(0, len(v) - 1) for v in AXES.values())))
def test_a_grid_of_layouts_serves_as_each_layout_alone(choices, cell):
    setting, shape = setting_of(*choices), tuple(len(values) for values in AXES.values())
    together = cost_workload(laid_out(setting, **columns_of()), NullLedger())
    own = {name: values[at] for (name, values), at in zip(AXES.items(), cell, strict=True)}
    alone = cost_workload(laid_out(setting, **own), Ledger())

    peaks = np.broadcast_to(together.memory.peak_bytes, shape)
    assert peaks[cell] == pytest.approx(alone.memory.peak_bytes, rel=1e-12)
    assert np.broadcast_to(together.fits, shape)[cell] == alone.fits
    for name in FIGURES:
        expected = getattr(alone.performance, name)
        if expected is not None:
            column = np.broadcast_to(getattr(together.performance, name), shape)
            assert column[cell] == pytest.approx(expected, rel=1e-9)


def test_a_ledger_that_forgets_serves_the_same():
    setting = setting_of(SPARSE_MODEL, 0, "vllm")
    assert (
        cost_workload(setting, NullLedger()).performance
        == cost_workload(setting, Ledger()).performance
    )


SPARSE_FP8 = "Qwen/Qwen3-235B-A22B-FP8"
LONG_PROMPTS = {**SERVE, "input_tokens": 100_000, "concurrency": 1}
SPACES = {
    "dense": (LLAMA_8B, 4, SERVE, {}),
    "sparse": (SPARSE_FP8, 4, SERVE, {"pins": {"pipeline_parallel_size": 1}}),
    "open": (LLAMA_70B, 2, {**SERVE, "concurrency": None, "request_rate_per_second": 3}, {}),
    "long": (LLAMA_8B, 4, LONG_PROMPTS, {}),
    "offline": (LLAMA_8B, 2, {**GENERATE, "batch_size": 32}, {}),
    "frugal": (LLAMA_8B, 4, SERVE, {"objective": "cost"}),
    "one copy": (LLAMA_8B, 4, SERVE, {"pins": {"data_parallel_size": 1}}),
}
SPEED_FIGURES = ("tokens_per_second", "latency_seconds", "ttft_seconds", "tpot_seconds")


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


def test_every_cell_of_a_block_costs_what_its_strategy_costs_alone():
    for name in SPACES:
        for block in blocks_of(name)[::2]:
            scores = score(block)
            for row in range(0, len(scores), 5):
                alone = scores.exact(row)
                assert bool(scores.fits[row]) == alone.fits, name
                for figure in SPEED_FIGURES:
                    column = scores.figures(figure)
                    assert column[row] == pytest.approx(
                        getattr(alone.performance, figure), rel=1e-9
                    )
                peak = scores.figures("per_device_peak_bytes")[row]
                assert peak == pytest.approx(alone.memory.per_device_peak_bytes, abs=1), name


def test_no_strategy_is_in_the_space_twice():
    for name in SPACES:
        written = [strategy.model_dump_json() for strategy in strategies(name)]
        assert len(set(written)) == len(written), name


def test_a_sparse_model_may_split_experts_and_attention_and_a_dense_one_has_neither():
    found = {
        (s.tensor_parallel_size, s.attention_data_parallel_size or 1, s.expert_parallel_size)
        for s in strategies("sparse")
        if s.data_parallel_size == 1
    }

    # vLLM spreads the experts over all ranks, or cuts all of them.
    assert {(4, 1, 1), (4, 1, 4), (2, 2, 4), (1, 4, 4)} <= found
    assert all(experts in {1, tensor * ranks} for tensor, ranks, experts in found)

    fields = {name for s in strategies("dense") for name, value in s if value is not None}
    assert not {"expert_parallel_size", "attention_data_parallel_size"} & fields


def test_a_very_long_prompt_may_be_split_over_ranks_and_cut_into_chunks():
    found = strategies("long")
    assert {s.context_parallel_size for s in found} == {None}  # vLLM has no flag for more
    assert {s.max_batch_tokens for s in found if s.chunked_prefill} >= {2048, 8192}


def test_a_single_copy_leaves_no_device_idle_unless_that_saves():
    sizes = {s.tensor_parallel_size * s.pipeline_parallel_size for s in strategies("one copy")}
    assert sizes == {4}
    sizes = {s.data_parallel_size * s.tensor_parallel_size for s in strategies("frugal")}
    assert 1 in sizes


def test_pinned_fields_keep_their_value_and_the_rest_stays_open():
    for pins in (
        {"tensor_parallel_size": 2}, {"data_parallel_size": 2, "weight_dtype": "int8"},
        {"quantization": "gptq"}, {"max_batch_tokens": 2048}, {"weight_dtype": "nf4"},
        {"kv_cache_dtype": "fp8", "chunked_prefill": True},
    ):  # fmt: skip
        answer = plan(request_of(LLAMA_8B, 4, SERVE, {"pins": pins}))
        for offered in answer.plans:
            assert {name: getattr(offered.strategy, name) for name in pins} == pins, pins
        assert answer.searched.strategies > 1, pins


def test_blocks_that_cannot_be_costed_leave_the_others():
    """A draft model cannot be split into stages: layouts without stages are still offered."""
    pins = {"speculative": {"draft_model": LLAMA_8B, "tokens": 4, "acceptance_ratio": 0.7}}
    answer = plan(request_of(LLAMA_70B, 4, SERVE, {"pins": pins}))
    assert {offered.strategy.pipeline_parallel_size for offered in answer.plans} == {1}


def test_serving_405b_is_planned_and_says_how_long_it_searched():
    for devices in (8, 64):
        cluster = {"device": "h200-sxm-141gb", "devices_per_node": 8, "nodes": devices // 8}
        request = PlanRequest.model_validate(
            {"model": LLAMA_405B, "cluster": cluster, "workload": SERVE, "engine": "vllm"}
        )
        answer = plan(request)
        assert answer.plans, devices
        assert answer.searched.seconds > 0, devices  # how few: `manage.py bench planner`


def test_llama_cpp_splits_by_tensor_ranks_or_layers_and_some_models_by_layers_alone():
    for model, pins, words in (
        (LLAMA_8B, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "not by both"),
        ("deepseek-ai/DeepSeek-V2-Lite", {"tensor_parallel_size": 2}, "cuts no deepseek_v2 model"),
    ):
        request = request_of(model, 4, SERVE, {"engine": "llama_cpp", "pins": pins})
        with pytest.raises(NotPossibleError, match=words):
            plan(request)
    answer = plan(request_of(LLAMA_8B, 4, SERVE, {"engine": "llama_cpp"}))
    sizes = {
        (p.strategy.tensor_parallel_size, p.strategy.pipeline_parallel_size) for p in answer.plans
    }
    assert all(1 in both for both in sizes), sizes
