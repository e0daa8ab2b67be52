"""Laws of memory: what the devices hold together, and what a change of layout may do to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.catalog.models import get_model, model_from_config
from planner.cost.parameters import count_parameters
from planner.specs.model import ModelSpec
from tests.planner.asking import LLAMA_70B, MIXTRAL, SERVE, TRAIN, ask, held
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
