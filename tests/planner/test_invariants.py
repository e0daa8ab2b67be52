"""Laws that hold for every request, each of which some other planner breaks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.catalog.models import get_model, model_from_config
from planner.cost.parameters import count_parameters
from tests.planner.asking import LLAMA_8B, LLAMA_70B, SERVE, TRAIN, ask, held, search

few = settings(max_examples=25, deadline=None)
TOKENS = st.integers(16, 8000)
COUNTS = st.sampled_from([1, 2, 4, 8])
DTYPES = st.sampled_from(["fp32", "bf16", "int8", "int4"])


@st.composite
def configs(draw):
    heads = draw(st.sampled_from([4, 8, 16]))
    groups = draw(st.sampled_from([1, 2, 4]))
    return {
        "model_type": draw(st.sampled_from(["llama", "qwen2", "qwen3"])),
        "hidden_size": heads * draw(st.sampled_from([32, 64, 128])),
        "intermediate_size": draw(st.integers(64, 4096)),
        "num_hidden_layers": draw(st.integers(1, 48)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads // groups,
        "vocab_size": draw(st.integers(256, 100_000)),
        "tie_word_embeddings": draw(st.booleans()),
    }


@few
@given(config=configs())
def test_any_config_of_a_covered_family_can_be_estimated(config):
    """One peer cannot represent Llama-3 at all, another fails when f/h is not 3.5."""
    found = ask(model=config, workload={**SERVE, "input_tokens": 64})

    assert found.performance.tpot_seconds > 0


@few
@given(config=configs(), tensor=COUNTS)
def test_the_devices_together_hold_at_least_the_model(config, tensor):
    """Per-device sums times devices are never less than the whole."""
    if config["num_attention_heads"] % tensor:
        return
    found = ask(model=config, devices=tensor, strategy={"tensor_parallel_size": tensor})
    whole = 2 * count_parameters(model_from_config(config)).total

    assert held(found, "weights") * tensor >= whole - tensor


def test_eight_devices_can_be_used_as_eight():
    """A peer's search stops at TP x PP < devices and never offers an 8-GPU plan."""
    answer = search(model=LLAMA_70B, devices=8, objective="latency", top=100)
    sizes = {plan.strategy.tensor_parallel_size for plan in answer.plans}

    assert 8 in sizes


@few
@given(micro=st.sampled_from([1, 2, 4]), recomputation=st.sampled_from(["none", "full"]))
def test_a_training_step_is_at_least_its_six_n_d(micro, recomputation):
    """A peer multiplies recomputation by the layers twice: 3.24 min instead of 1.11."""
    strategy = {"micro_batch_size": micro, "activation_recomputation": recomputation}
    found = ask(workload=TRAIN, strategy=strategy, engine="megatron")
    ideal = 6 * count_parameters(get_model(LLAMA_8B)).total * 16 * 2048 / 9.89e14

    assert ideal <= found.performance.step_seconds <= 4 * ideal


@few
@given(batch=st.sampled_from([4, 8, 16]), length=st.sampled_from([512, 1024, 4096]))
def test_tokens_per_second_times_the_step_are_the_steps_tokens(batch, length):
    """A peer divides one micro-batch by the whole accumulated step."""
    workload = {**TRAIN, "global_batch_size": batch, "sequence_length": length}
    found = ask(workload=workload, strategy={"micro_batch_size": 1}).performance

    assert found.tokens_per_second * found.step_seconds == pytest.approx(batch * length)


@few
@given(optimizer=st.sampled_from(["adamw", "lion", "adafactor"]))
def test_sixteen_bit_states_never_take_more_than_thirty_two_bit_ones(optimizer):
    """DeepSpeed's autotuner counts 20 bytes a parameter where there are 16."""
    workload = {**TRAIN, "optimizer": optimizer}
    narrow = ask(workload=workload, strategy={"weight_dtype": "bf16"})
    wide = ask(workload=workload, strategy={"weight_dtype": "fp32"})

    for name in ("weights", "gradients", "optimizer_states"):
        assert held(narrow, name) <= held(wide, name)


@few
@given(tokens=TOKENS, requests=st.integers(1, 64))
def test_kv_cache_is_tokens_times_the_bytes_of_one(tokens, requests):
    """A peer's KV estimate is off by the number of sequences."""
    workload = {"kind": "generate", "batch_size": requests, "output_tokens": 16}
    found = ask(model=LLAMA_70B, workload={**workload, "input_tokens": tokens}, devices=8)
    per_token = 2 * 8 * 128 * 2 * 80

    assert held(found, "kv_cache") == round(requests / 8 * (tokens + 16) * per_token)


@few
@given(batch=st.integers(1, 200), more=st.integers(1, 200))
def test_more_requests_never_make_a_token_faster(batch, more):
    slow = ask(workload={**SERVE, "concurrency": batch + more}, engine="vllm")
    fast = ask(workload={**SERVE, "concurrency": batch}, engine="vllm")

    assert slow.performance.tpot_seconds >= fast.performance.tpot_seconds


@few
@given(tokens=TOKENS, more=st.integers(1, 4000))
def test_a_longer_prompt_never_costs_less(tokens, more):
    short = ask(workload={**SERVE, "input_tokens": tokens})
    long = ask(workload={**SERVE, "input_tokens": tokens + more})

    assert long.performance.ttft_seconds >= short.performance.ttft_seconds
    assert held(long, "kv_cache") >= held(short, "kv_cache")


@few
@given(factor=st.floats(1.0, 10.0))
def test_more_bandwidth_never_makes_anything_slower(factor):
    device = {"memory_bytes": 80 * 1024**3, "peak_flops_per_second": {"bf16": 9e14}}
    base = {**device, "memory_bandwidth_bytes_per_second": 1e12}
    wide = {**device, "memory_bandwidth_bytes_per_second": 1e12 * factor}

    fast, slow = ask(device=wide).performance, ask(device=base).performance

    assert fast.tpot_seconds <= slow.tpot_seconds
    assert fast.ttft_seconds <= slow.ttft_seconds


@few
@given(dtype=DTYPES)
def test_fewer_bits_never_take_more_memory(dtype):
    order = ["fp32", "bf16", "int8", "int4"]
    wider = order[max(0, order.index(dtype) - 1)]

    narrow = ask(strategy={"weight_dtype": dtype})
    assert held(narrow, "weights") <= held(ask(strategy={"weight_dtype": wider}), "weights")


@few
@given(data=st.sampled_from([2, 4, 8, 16]))
def test_sharding_further_never_takes_more(data):
    held_by_stage = [
        ask(
            devices=data,
            workload=TRAIN,
            engine="megatron",
            strategy={"zero_stage": stage, "data_parallel_size": data},
        )
        for stage in range(4)
    ]

    for name in ("weights", "gradients", "optimizer_states"):
        sizes = [held(found, name) for found in held_by_stage]
        assert sizes == sorted(sizes, reverse=True)


def test_one_data_rank_has_no_data_parallel_traffic():
    assert ask(workload=TRAIN).performance.communication_ratio == 0.0


@few
@given(tensor=COUNTS)
def test_memory_at_twice_the_ranks_is_never_more(tensor):
    devices = 2 * tensor
    one = ask(model=LLAMA_70B, devices=devices, strategy={"tensor_parallel_size": tensor})
    two = ask(model=LLAMA_70B, devices=devices, strategy={"tensor_parallel_size": devices})

    assert held(two, "weights") <= held(one, "weights")


@few
@given(config=configs())
def test_every_answer_survives_json(config):
    found = ask(model=config, workload={**SERVE, "input_tokens": 64})

    assert type(found).model_validate_json(found.model_dump_json()) == found
