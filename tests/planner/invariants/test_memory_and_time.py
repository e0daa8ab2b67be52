"""Laws of memory and time: what is held, what work takes at least, and how a change moves it."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from planner.catalog.models import get_model, model_from_config
from planner.cost.parameters import count_parameters
from planner.specs.model import ModelSpec
from tests.planner.asking import LLAMA_8B, LLAMA_70B, MIXTRAL, SERVE, TRAIN, ask, held
from tests.planner.invariants.drawing import (
    COUNTS,
    DTYPES,
    GENERATE,
    SEQUENCES,
    TOKENS,
    configs,
    few,
    latent_models,
    sparse_configs,
)

STATES = ("weights", "gradients", "optimizer_states")
ORDER = ["fp32", "bf16", "int8", "int4"]


@few
@given(config=configs(), tensor=COUNTS)
def test_the_devices_together_hold_at_least_the_model(config, tensor):
    """The cookbook divides ZeRO-3 weights by the ranks twice: the sum is less than the model."""
    if config["num_attention_heads"] % tensor:
        return
    found = ask(model=config, devices=tensor, strategy={"tensor_parallel_size": tensor})
    whole = 2 * count_parameters(model_from_config(config)).total
    assert held(found, "weights") * tensor >= whole - tensor


@few
@given(config=configs(), stages=st.sampled_from([1, 2, 4]))
def test_the_stages_of_a_pipeline_together_hold_at_least_the_model(config, stages):
    """fm-training-estimator divides activations by the layers and forgets the ends."""
    if config["num_hidden_layers"] < stages:
        return
    found = ask(model=config, devices=stages, strategy={"pipeline_parallel_size": stages})
    whole = 2 * count_parameters(model_from_config(config)).total
    beside = stages * held(found, "runtime_overhead")
    assert sum(found.memory.per_stage_peak_bytes) - beside >= whole - stages


@few
@given(data=st.sampled_from([2, 4, 8, 16]), stage=st.sampled_from([0, 1, 2, 3]))
def test_the_ranks_together_hold_every_state_once(data, stage):
    """The cookbook shards states once too often, DeepSpeed's estimator counts frozen ones."""
    strategy = {"zero_stage": stage, "data_parallel_size": data}
    found = ask(devices=data, workload=TRAIN, engine="megatron", strategy=strategy)
    parameters = count_parameters(get_model("meta-llama/Llama-3.1-8B")).total
    for name, each in (("weights", 2), ("gradients", 2), ("optimizer_states", 12)):
        assert held(found, name) * data >= parameters * each - data


@few
@given(data=st.sampled_from([2, 4, 8, 16]))
def test_sharding_further_never_takes_more(data):
    """Galvatron's ratio of ZeRO-2 is larger than that of ZeRO-1 for two ranks."""
    answers = [
        ask(
            devices=data,
            workload=TRAIN,
            engine="megatron",
            strategy={"zero_stage": stage, "data_parallel_size": data},
        )
        for stage in range(4)
    ]

    for name in STATES:
        sizes = [held(found, name) for found in answers]
        assert sizes == sorted(sizes, reverse=True)


@few
@given(optimizer=st.sampled_from(["adamw", "lion", "adafactor", "adamw_8bit", "sgd"]))
def test_sixteen_bit_states_never_take_more_than_thirty_two_bit_ones(optimizer):
    """DeepSpeed's autotuner counts 20 bytes a parameter in fp16, where fp32 takes 16."""
    workload = {**TRAIN, "optimizer": optimizer}
    narrow = ask(workload=workload, strategy={"weight_dtype": "bf16"})
    wide = ask(workload=workload, strategy={"weight_dtype": "fp32"})
    for name in STATES:
        assert held(narrow, name) <= held(wide, name)


@few
@given(rank=st.sampled_from([1, 4, 16, 64, 256]))
def test_adapters_hold_states_for_what_they_train_alone(rank):
    """DeepSpeed's estimator counts frozen parameters as trained ones (issue 5304)."""
    full = ask(workload=TRAIN, engine="deepspeed")
    lora = ask(workload={**TRAIN, "method": "lora", "lora_rank": rank}, engine="deepspeed")
    one = ask(workload={**TRAIN, "method": "lora", "lora_rank": 1}, engine="deepspeed")
    assert held(lora, "optimizer_states") < held(full, "optimizer_states") / 10
    assert held(lora, "gradients") == pytest.approx(rank * held(one, "gradients"), rel=1e-3)


@few
@given(tokens=TOKENS, requests=st.integers(1, 64))
def test_kv_cache_is_tokens_times_the_bytes_of_one(tokens, requests):
    """configiq's bytes per token contradict its own total; its KV cache is off by the heads."""
    workload = {"kind": "generate", "batch_size": requests, "output_tokens": 16}
    found = ask(model=LLAMA_70B, workload={**workload, "input_tokens": tokens}, devices=8)
    per_token = 2 * 8 * 128 * 2 * 80
    assert held(found, "kv_cache") == -(-requests // 8) * (tokens + 16) * per_token


@few
@given(config=configs(), tokens=TOKENS)
def test_the_cache_holds_key_value_heads_and_not_query_heads(config, tokens):
    """LLM-Viewer reads the cache of all query heads, eight times too much for Llama-3."""
    workload = {**GENERATE, "batch_size": 1, "input_tokens": tokens}
    shared = ask(model=config, workload=workload)
    heads = config["num_attention_heads"]
    whole = ask(model={**config, "num_key_value_heads": heads}, workload=workload)
    ratio = heads / config["num_key_value_heads"]
    assert held(whole, "kv_cache") == pytest.approx(ratio * held(shared, "kv_cache"), abs=ratio)


@few
@given(fields=latent_models(), tensor=st.sampled_from([2, 4, 8]))
def test_latents_are_whole_on_every_rank(fields, tensor):
    """Formulas for heads divide a latent cache by the tensor ranks, though it has no heads."""
    alone = ask(model=fields, workload=GENERATE, device="b300-sxm", engine="sglang")
    split = ask(
        model=fields,
        workload=GENERATE,
        device="b300-sxm",
        devices=tensor,
        engine="sglang",
        strategy={"tensor_parallel_size": tensor},
    )

    assert held(split, "kv_cache") == held(alone, "kv_cache")
    assert held(split, "weights") < held(alone, "weights")


@few
@given(window=st.sampled_from([512, 1024, 4096]), tokens=TOKENS)
def test_a_sliding_layer_never_keeps_more_than_its_window(window, tokens):
    """LM Studio counts the whole context for windows, 40 to 67 % too much (issue 1862)."""
    base = get_model("meta-llama/Llama-3.1-8B").model_dump(exclude={"attention_layers"})
    layers = {"kind": "sliding", "count": 32, "window": window}
    sliding = ModelSpec.model_validate({**base, "attention_layers": [layers]})
    workload = {**GENERATE, "batch_size": 1, "input_tokens": tokens}
    found = ask(model=sliding.model_dump(), workload=workload)
    most = min(window, tokens + GENERATE["output_tokens"]) * 2 * 8 * 128 * 2 * 32
    assert held(found, "kv_cache") <= most + 1


@few
@given(dtype=DTYPES)
def test_fewer_bits_never_take_more_memory(dtype):
    """llm-inference-calculator scales a cache with the parameters, whatever the bits."""
    wider = ORDER[max(0, ORDER.index(dtype) - 1)]
    narrow = ask(strategy={"weight_dtype": dtype})
    assert held(narrow, "weights") <= held(ask(strategy={"weight_dtype": wider}), "weights")


@few
@given(tensor=COUNTS)
def test_memory_at_twice_the_ranks_is_never_more(tensor):
    """Calculators that round heads down lose key-value heads beyond as many ranks."""
    one, two = (
        ask(
            model=LLAMA_70B,
            workload=GENERATE,
            devices=2 * tensor,
            strategy={"tensor_parallel_size": ranks, "data_parallel_size": 1},
        )
        for ranks in (tensor, 2 * tensor)
    )

    assert held(two, "weights") <= held(one, "weights")
    assert held(two, "kv_cache") <= held(one, "kv_cache")


@few
@given(config=sparse_configs())
def test_a_sparse_model_is_held_whole(config):
    """llmfit took the memory of a mixture of experts from its active parameters (issue 230)."""
    found = ask(model=config, workload=GENERATE, device="b300-sxm", engine="vllm")
    assert held(found, "weights") >= 2 * count_parameters(model_from_config(config)).total - 1


@few
@given(experts=st.sampled_from([1, 2, 4, 8]))
def test_expert_ranks_together_hold_every_expert(experts):
    """Megatron's calculator leaves the domain of expert-parallel replicas out (Bridge 3744)."""
    strategy = {"tensor_parallel_size": 8, "expert_parallel_size": experts}
    found = ask(model=MIXTRAL, devices=8, strategy=strategy, engine="sglang")
    assert held(found, "weights") * 8 >= 2 * count_parameters(get_model(MIXTRAL)).total - 8


@few
@given(length=st.sampled_from([512, 2048, 8192]), micro=st.sampled_from([1, 2, 4]))
def test_recomputing_more_never_keeps_more(length, micro):
    """Calculon's activations with full recomputation are up to 30 % off their own table."""
    workload = {**TRAIN, "sequence_length": length}
    kept = [
        held(
            ask(
                workload=workload,
                engine="megatron",
                strategy={"activation_recomputation": how, "micro_batch_size": micro},
            ),
            "activations",
        )
        for how in ("none", "selective", "full")
    ]

    assert kept == sorted(kept, reverse=True)


@few
@given(batch=SEQUENCES, more=st.integers(1, 64))
def test_more_sequences_never_hold_less(batch, more):
    """Ollama's estimates shrank with parallel requests (issues 8447, 11819)."""
    few_held, more_held = (
        ask(workload={**GENERATE, "batch_size": size}).memory.per_device_peak_bytes
        for size in (batch, batch + more)
    )
    assert more_held > few_held


@few
@given(concurrency=SEQUENCES)
def test_the_classes_of_a_device_add_up_to_its_peak(concurrency):
    """aiconfigurator adds one constant for all that its classes leave out."""
    memory = ask(workload={**SERVE, "concurrency": concurrency}, engine="vllm").memory
    assert sum(memory.breakdown_bytes.values()) == pytest.approx(
        memory.per_device_peak_bytes, abs=len(memory.breakdown_bytes)
    )


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
