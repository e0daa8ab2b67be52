"""Laws of time: what work must take at least, and in which direction a change may move it."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from planner.catalog.models import get_model, model_from_config
from planner.cost.parameters import count_parameters
from tests.planner.asking import LLAMA_8B, LLAMA_70B, MIXTRAL, SERVE, TRAIN, ask
from tests.planner.invariants.drawing import COUNTS, GENERATE, TOKENS, few, sparse_configs

H100_FLOPS, H100_BYTES_PER_S = 9.89e14, 3.35e12
DEVICE = {"memory_bytes": 80 * 1024**3, "peak_flops_per_second": {"bf16": 9e14}}


@few
@given(micro=st.sampled_from([1, 2, 4]), recomputation=st.sampled_from(["none", "full"]))
def test_a_training_step_is_at_least_its_six_n_d(micro, recomputation):
    """llm-analysis multiplies recomputation by the layers twice: 3.24 min instead of 1.11."""
    strategy = {"micro_batch_size": micro, "activation_recomputation": recomputation}
    found = ask(workload=TRAIN, strategy=strategy, engine="megatron")
    ideal = 6 * count_parameters(get_model(LLAMA_8B)).total * 16 * 2048 / H100_FLOPS
    assert ideal <= found.performance.step_seconds <= 4 * ideal


@few
@given(batch=st.sampled_from([4, 8, 16]), length=st.sampled_from([512, 1024, 4096]))
def test_tokens_per_second_times_the_step_are_the_steps_tokens(batch, length):
    """llm-analysis divides one micro-batch by the whole accumulated step (42 tokens/s)."""
    workload = {**TRAIN, "global_batch_size": batch, "sequence_length": length}
    found = ask(workload=workload, strategy={"micro_batch_size": 1}).performance
    assert found.tokens_per_second * found.step_seconds == pytest.approx(batch * length)
    assert found.samples_per_second * found.step_seconds == pytest.approx(batch)


@few
@given(tensor=COUNTS, batch=st.integers(1, 32))
def test_a_token_takes_at_least_the_reading_of_the_weights(tensor, batch):
    """premai's rows, and llmfit for cards with a given memory, beat the bandwidth of the card."""
    workload = {**GENERATE, "batch_size": batch}
    strategy = {"tensor_parallel_size": tensor, "data_parallel_size": 1}
    found = ask(workload=workload, devices=tensor, strategy=strategy, engine="vllm")
    read = 2 * (count_parameters(get_model(LLAMA_8B)).total - 128256 * 4096)
    assert found.performance.tpot_seconds >= read / tensor / H100_BYTES_PER_S


@few
@given(tokens=st.integers(256, 8000), tensor=COUNTS)
def test_a_prompt_takes_at_least_two_n_d(tokens, tensor):
    """GenZ's and LLM-Viewer's prompts run 1.4 to 1.9 times faster than TensorRT-LLM does."""
    workload = {**GENERATE, "batch_size": 1, "input_tokens": tokens}
    strategy = {"tensor_parallel_size": tensor, "data_parallel_size": 1}
    found = ask(workload=workload, devices=tensor, strategy=strategy, engine="vllm")
    linear = count_parameters(get_model(LLAMA_8B)).layer_linear
    assert found.performance.prefill_seconds >= 2 * linear * tokens / tensor / H100_FLOPS


@few
@given(batch=st.integers(1, 200), more=st.integers(1, 200))
def test_more_requests_never_make_a_token_faster(batch, more):
    """aiconfigurator's first-token time is not monotone in concurrency (PR 1510)."""
    slow = ask(workload={**SERVE, "concurrency": batch + more}, engine="vllm")
    fast = ask(workload={**SERVE, "concurrency": batch}, engine="vllm")
    assert slow.performance.tpot_seconds >= fast.performance.tpot_seconds


@few
@given(tokens=TOKENS, more=st.integers(1, 4000))
def test_a_longer_prompt_never_costs_less(tokens, more):
    """gguf-parser's estimate fell where a longer context changed the rope scaling (2443)."""
    short = ask(workload={**SERVE, "input_tokens": tokens})
    long = ask(workload={**SERVE, "input_tokens": tokens + more})
    assert long.performance.ttft_seconds >= short.performance.ttft_seconds
    assert long.memory.per_device_peak_bytes >= short.memory.per_device_peak_bytes


@few
@given(factor=st.floats(1.0, 10.0))
def test_more_bandwidth_never_makes_anything_slower(factor):
    """llmfit keeps one bandwidth for every card of a vendor (issue 88)."""
    base = {**DEVICE, "memory_bandwidth_bytes_per_second": 1e12}
    wide = {**base, "memory_bandwidth_bytes_per_second": 1e12 * factor}
    fast, slow = ask(device=wide).performance, ask(device=base).performance
    assert fast.tpot_seconds <= slow.tpot_seconds
    assert fast.ttft_seconds <= slow.ttft_seconds


@few
@given(factor=st.floats(1.0, 10.0))
def test_a_higher_peak_never_makes_anything_slower(factor):
    """Tables that mix sparse and dense peaks make a faster chip look slower."""
    base = {**DEVICE, "memory_bandwidth_bytes_per_second": 2e12}
    quick = {**base, "peak_flops_per_second": {"bf16": 9e14 * factor}}

    for workload in (SERVE, {**TRAIN, "global_batch_size": 4}):
        fast = ask(device=quick, workload=workload).performance
        slow = ask(device=base, workload=workload).performance
        assert fast.tokens_per_second >= slow.tokens_per_second


@few
@given(factor=st.floats(1.0, 20.0))
def test_a_faster_network_never_slows_training(factor):
    """llm-analysis has no traffic of data or pipeline parallelism: no network is too slow."""
    strategy = {"zero_stage": 3}
    slow, fast = (
        ask(
            cluster={
                "device": "a100-sxm4-80gb",
                "devices_per_node": 4,
                "nodes": 2,
                "inter_node_bandwidth_bytes_per_second": bandwidth,
            },
            workload=TRAIN,
            engine="megatron",
            strategy=strategy,
        ).performance.step_seconds
        for bandwidth in (1e9, 1e9 * factor)
    )

    assert fast <= slow


@few
@given(config=sparse_configs())
def test_a_sparse_model_decodes_a_token_by_its_active_experts(config):
    """llmfit took the speed of a mixture of experts from all parameters (issue 474)."""
    counts = count_parameters(model_from_config(config))
    assume(counts.experts_active * 4 <= counts.experts)
    all_of_them = {**config, "num_experts_per_tok": config["num_experts"]}
    workload = {**GENERATE, "batch_size": 1}

    part = ask(model=config, workload=workload, engine="vllm").performance
    whole = ask(model=all_of_them, workload=workload, engine="vllm").performance

    assert part.tpot_seconds < whole.tpot_seconds
    assert part.prefill_seconds < whole.prefill_seconds


def test_a_sparse_step_trains_the_active_parameters():
    """llm-analysis leaves the experts per token out of the feed-forward work."""
    found = ask(model=MIXTRAL, workload=TRAIN, device="b300-sxm", engine="megatron").performance
    active = count_parameters(get_model(MIXTRAL)).active
    work = found.model_flops_per_second_per_device * found.step_seconds
    assert work == pytest.approx(6 * active * 16 * 2048, rel=0.1)


def test_one_data_rank_has_no_data_parallel_traffic():
    """llm-analysis applies the exchange of sharded data parallelism at ZeRO stage 0."""
    assert ask(workload=TRAIN).performance.communication_ratio == 0.0


@few
@given(stage=st.sampled_from([0, 1, 2, 3]), engine=st.sampled_from(["megatron", "deepspeed"]))
def test_no_stage_of_zero_exchanges_anything_on_one_rank(stage, engine):
    """llm-analysis charges gathers wherever a ZeRO stage is set."""
    found = ask(workload=TRAIN, engine=engine, strategy={"zero_stage": stage})
    assert not found.performance.communication_ratio


@few
@given(stages=st.sampled_from([2, 4, 8]), micro_batches=st.sampled_from([8, 16, 64]))
def test_the_bubble_is_the_published_share_of_the_step(stages, micro_batches):
    """llm-analysis has no bubble; its pipelines are free."""
    found = ask(
        model=LLAMA_70B,
        device="b300-sxm",
        devices=stages,
        engine="megatron",
        workload={**TRAIN, "global_batch_size": micro_batches},
        strategy={"pipeline_parallel_size": stages, "micro_batch_size": 1},
    ).performance

    most = (stages - 1) / (micro_batches + stages - 1)
    assert 0.9 * most <= found.bubble_ratio <= most + 1e-9


@few
@given(first=TOKENS, more=st.integers(1, 4000))
def test_a_longer_context_never_decodes_faster(first, more):
    """llm-analysis reads the cache twice, and others read the mean of no context at all."""
    near, far = (
        ask(workload={**GENERATE, "input_tokens": tokens}).performance.tpot_seconds
        for tokens in (first, first + more)
    )
    assert far >= near
