"""Layouts of serving: experts over ranks, attention by request, context over ranks."""

import pytest

from planner.catalog.models import get_model
from planner.errors import NotCoveredError, NotPossibleError
from planner.workload.forward import further_operators
from tests.planner.asking import LLAMA_70B, SERVE, TRAIN, ask, held

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


def test_whole_experts_on_ranks_of_one_group_exchange_nothing():
    """A peer charges an all-to-all although the ranks hold the same tokens."""
    cut = sparse(tensor_parallel=8)
    whole = sparse(tensor_parallel=8, expert_parallel=8)

    assert not terms(whole, "Expert all-to-all")
    assert terms(cut, "Tensor-parallel all-reduces") == terms(whole, "Tensor-parallel all-reduces")


def test_few_tokens_fall_unevenly_on_whole_experts():
    cut = sparse(FEW, tensor_parallel=8)
    whole = sparse(FEW, tensor_parallel=8, expert_parallel=8)

    assert terms(whole, "Experts")[0] > 1.3 * terms(cut, "Experts")[0]


def test_whole_and_cut_experts_take_the_same_memory():
    cut = sparse(tensor_parallel=8)
    whole = sparse(tensor_parallel=8, expert_parallel=8)

    assert held(cut, "weights") == held(whole, "weights")


def test_attention_by_request_splits_the_cache_that_tensor_ranks_would_replicate():
    """Four KV heads over eight ranks are kept twice; by request they are kept once."""
    some = {**SERVE, "concurrency": 64}
    tensor = sparse(some, tensor_parallel=8, expert_parallel=8)
    data = sparse(some, tensor_parallel=1, attention_data_parallel=8, expert_parallel=8)

    assert held(data, "kv_cache") == pytest.approx(held(tensor, "kv_cache") / 2, rel=0.01)
    assert held(data, "weights") > held(tensor, "weights")


def test_attention_by_request_pays_an_exchange_of_tokens():
    found = sparse(tensor_parallel=1, attention_data_parallel=8, expert_parallel=8)

    assert terms(found, "Expert all-to-all")[0] > 0
    assert terms(found, "Tensor-parallel all-reduces") == [0.0]


def test_attention_by_request_gives_one_request_a_rank_of_its_own():
    alone = {**SERVE, "concurrency": 1}
    one, four = (
        sparse(workload, attention_data_parallel=8, expert_parallel=8) for workload in (alone, FEW)
    )

    assert terms(one, "Attention and KV-cache reads") == terms(
        four, "Attention and KV-cache reads"
    )


@pytest.mark.parametrize(
    "written",
    [
        {"tensor_parallel": 8, "attention_data_parallel": 8, "expert_parallel": 8},
        {"tensor_parallel": 1, "data_parallel": 8, "expert_parallel": 8},
    ],
    ids=["as SGLang counts", "as vLLM counts"],
)
def test_other_ways_of_counting_the_same_ranks_are_understood(written):
    ours = sparse(tensor_parallel=1, attention_data_parallel=8, expert_parallel=8)
    found = sparse(**written)

    assert found.strategy == ours.strategy
    assert found.performance == ours.performance


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


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama_cpp"])
def test_a_context_split_that_the_engine_cannot_be_told_is_refused(engine):
    strategy = {"tensor_parallel_size": 1, "context_parallel_size": 4}

    with pytest.raises(NotPossibleError, match="context_parallel_size is 4") as refused:
        ask(devices=4, workload=LONG, strategy=strategy, engine=engine)

    assert refused.value.field == "strategy.context_parallel_size"


def test_data_parallel_attention_is_for_inference():
    with pytest.raises(NotCoveredError, match="which inference uses"):
        ask(workload=TRAIN, devices=2, strategy={"attention_data_parallel_size": 2})


def test_interleaved_pipelines_are_for_training():
    with pytest.raises(NotCoveredError, match="which training uses"):
        ask(devices=2, strategy={"virtual_pipeline_size": 2, "pipeline_parallel_size": 2})


def test_a_shared_prefix_is_attended_to_but_not_computed():
    """Prefill of s tokens after a cached prefix p: the pairs of s + p without those of p."""
    whole = ask(workload=FEW, engine="vllm")
    shared = ask(workload={**FEW, "prefix_share_ratio": 0.5}, engine="vllm")
    name = "Attention: arithmetic"
    n = FEW["input_tokens"]
    pairs = (n * (n + 1) - n / 2 * (n / 2 + 1)) / (n * (n + 1))

    found = terms(shared, name, "prefill")[0] / terms(whole, name, "prefill")[0]
    assert found == pytest.approx(pairs)


def test_a_shared_prefix_is_kept_once_for_all_requests():
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
