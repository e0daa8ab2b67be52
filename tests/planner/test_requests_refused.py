"""What the planner refuses: by field, value, limit and a way out; defaults; rules of layouts."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from planner.__main__ import parse_model
from planner.catalog.engines import get_engine
from planner.catalog.models import get_model
from planner.specs.base import (
    BadRequestError,
    NotCoveredError,
    NotPossibleError,
    UnknownDeviceError,
    UnknownModelError,
)
from planner.specs.estimate import EstimateRequest
from planner.specs.workload import ServeWorkload, Strategy, TrainWorkload
from planner.workload.layouts import (
    Layout,
    Rule,
    batch_rules,
    check_rules,
    rank_rules,
    rules_mask,
    training_rules,
)
from planner.workload.option_rules import option_rules
from tests.planner.asking import (
    GENERATE,
    LLAMA_8B,
    LLAMA_70B,
    MIXTRAL,
    SERVE,
    TINY,
    TRAIN,
    ask,
    document,
    search,
)

MEGATRON = {"workload": TRAIN, "devices": 8, "engine": "megatron"}
COMPRESS = {"kind": "compress", "method": "int8_weight_only"}
IMPOSSIBLE = {
    "more ranks than devices": (
        {"devices": 2, "strategy": {"data_parallel_size": 2, "tensor_parallel_size": 2}},
        "tensor_parallel_size",
        ["2 data x 2 tensor x 1 pipeline", "take 4 devices", "has 2"],
    ),
    "context ranks are counted too": (
        {"devices": 4, "strategy": {"tensor_parallel_size": 4, "context_parallel_size": 2}},
        "tensor_parallel_size",
        ["2 context ranks", "take 8 devices", "has 4"],
    ),
    "uneven heads": (
        {"devices": 6, "strategy": {"tensor_parallel_size": 6}},
        "tensor_parallel_size",
        ["is 6", "32 attention heads"],
    ),
    "too many stages": (
        {"devices": 64, "strategy": {"pipeline_parallel_size": 33}},
        "pipeline_parallel_size",
        ["is 33", "32 layers"],
    ),
    "experts of a dense model": (
        {"devices": 2, "strategy": {"expert_parallel_size": 2}},
        "expert_parallel_size",
        ["is 2", LLAMA_8B, "dense"],
    ),
    "a batch that does not divide": (
        {**MEGATRON, "workload": {**TRAIN, "global_batch_size": 12}},
        "global_batch_size",
        ["is 12", "multiple of", "data_parallel_size 8"],
    ),
    "a micro-batch that does not divide": (
        {**MEGATRON, "workload": {**TRAIN, "global_batch_size": 40}, "strategy": {}},
        "micro_batch_size",
        ["is 3", "5 sequences"],
    ),
    "steps that do not add up": (
        {**MEGATRON, "strategy": {"micro_batch_size": 1, "gradient_accumulation_steps": 4}},
        "gradient_accumulation_steps",
        ["is 4", "2 sequences", "make 2"],
    ),
    "a ring that does not divide": (
        {**MEGATRON, "workload": {**TRAIN, "sequence_length": 2050}, "strategy": {}},
        "context_parallel_size",
        ["is 4", "2050 tokens"],
    ),
    "shards without a stage": (
        {**MEGATRON, "strategy": {"zero_shard_size": 4}},
        "zero_shard_size",
        ["is 4", "zero_stage is 0", "set zero_stage to 1, 2 or 3"],
    ),
}
IMPOSSIBLE["a micro-batch that does not divide"][0]["strategy"]["micro_batch_size"] = 3
IMPOSSIBLE["a ring that does not divide"][0]["strategy"]["context_parallel_size"] = 4


def test_an_impossible_layout_is_refused_by_its_field_with_both_numbers():
    for name, (fields, field, words) in IMPOSSIBLE.items():
        with pytest.raises(NotPossibleError) as caught:
            ask(**fields)
        assert caught.value.field.split(".")[-1] == field, name
        assert caught.value.code == "not_possible", name
        for word in words:
            assert word in caught.value.message, name


UNCOVERED = {
    "sparse training": ({"workload": TRAIN, "strategy": {"sparsity": 0.5}}, "sparsity", "0.5"),
    "interleaved serving": (
        {"devices": 2, "strategy": {"virtual_pipeline_size": 2, "pipeline_parallel_size": 2}},
        "virtual_pipeline_size",
        "training uses",
    ),
    "attention ranks in training": (
        {**MEGATRON, "strategy": {"attention_data_parallel_size": 2}},
        "attention_data_parallel_size",
        "inference uses",
    ),
    "an unheard-of format": ({"strategy": {"quantization": "w3a5"}}, "quantization", "w3a5"),
    "guesses in a batch": (
        {"workload": GENERATE, "strategy": {"speculative": {"draft_model": LLAMA_8B}}},
        "speculative",
        "this is generate",
    ),
    "pools for a training": (
        {**MEGATRON, "strategy": {"disaggregated": {"prefill_devices": 4, "decode_devices": 4}}},
        "disaggregated",
        "this is train",
    ),
    "a cache off the device in training": (
        {"workload": TRAIN, "strategy": {"offload": {"kv_cpu": 0.5}}},
        "offload.kv_cpu",
        "which has no cache",
    ),
    "states off the device in serving": (
        {"strategy": {"offload": {"optimizer": "cpu"}}},
        "offload.optimizer",
        "without training",
    ),
}


def test_what_has_no_formula_is_refused_by_its_field_and_can_be_left_out():
    for name, (fields, field, word) in UNCOVERED.items():
        with pytest.raises(NotCoveredError) as caught:
            ask(**fields)
        assert caught.value.field == f"strategy.{field}", name
        assert word in caught.value.message, name
        assert caught.value.to_json()["code"] == "not_covered", name
        assert "leave it out" in caught.value.message or "choose among" in caught.value.message


def test_a_search_refuses_pins_without_a_formula_and_impossible_layouts():
    for name in ("sparse training", "an unheard-of format"):
        fields, field, word = UNCOVERED[name]
        pinned = {key: value for key, value in fields.items() if key != "strategy"}
        with pytest.raises(NotCoveredError, match=word) as caught:
            search(**pinned, pins=fields["strategy"])
        assert caught.value.field.endswith(field), name

    with pytest.raises(NotPossibleError) as caught:
        search(devices=2, pins={"pipeline_parallel_size": 64})
    assert "64" in caught.value.message
    assert caught.value.field


def test_shares_of_one_tensor_class_are_at_most_the_whole():
    half = {"kv_cpu": 0.5, "kv_disk": 0.5}
    more = {"kv_cpu": 0.6, "kv_disk": 0.5}
    found = ask(workload=GENERATE, strategy={"offload": half})
    with pytest.raises(NotPossibleError, match=r"kv_cpu and kv_disk sum to 1\.1") as caught:
        ask(workload=GENERATE, strategy={"offload": more})
    assert found.strategy.offload.kv_disk == 0.5
    assert caught.value.field == "strategy.offload.kv_disk"


def test_offloading_without_effect_names_its_value_and_the_way_out():
    with pytest.raises(NotCoveredError, match=r"offload\.optimizer is 'cpu'") as caught:
        ask(workload=GENERATE, strategy={"offload": {"optimizer": "cpu"}})
    assert caught.value.message.endswith("set it to 'none', or leave it out")

    with pytest.raises(NotCoveredError, match=r"offload\.weights_active_ratio is 0\.5") as caught:
        ask(workload=TRAIN, strategy={"offload": {"weights_active_ratio": 0.5}})
    assert caught.value.message.endswith("; leave it out")


def test_bits_and_packing_are_refused_where_format_or_experts_are_missing():
    for bits in (1, 5, 6, 7, 12):
        with pytest.raises(BadRequestError, match="2, 3, 4, 8 or 16") as caught:
            ask(workload={**COMPRESS, "bits": bits})
        assert caught.value.field == "workload.bits", bits
        assert f"bits is {bits}" in caught.value.message, bits

    for bits in (0, 17):
        with pytest.raises(ValidationError, match="bits"):
            ask(workload={**COMPRESS, "bits": bits})

    packed = {"kind": "compress", "method": "qmoe"}
    with pytest.raises(NotPossibleError, match=LLAMA_70B) as caught:
        ask(model=LLAMA_70B, workload=packed)
    assert caught.value.field == "workload.method"
    assert ask(model=MIXTRAL, devices=8, workload=packed).performance.duration_seconds > 0


def test_arrivals_schedules_and_loads_out_of_their_range_are_refused():
    for loads in (
        {"concurrency": 4, "request_rate_per_second": 1.0},
        {"concurrency": 4, "burst_requests": 4},
        {"request_rate_per_second": 1.0, "burst_requests": 4},
    ):
        with pytest.raises(ValidationError, match="exclude each other: give one, or none"):
            ServeWorkload(input_tokens=10, output_tokens=10, **loads)

    whole = {"sequence_length": 2048, "global_batch_size": 8}
    with pytest.raises(ValidationError, match=r"add up to 0\.9, not 1"):
        TrainWorkload(**whole, length_schedule=((512, 0.4), (2048, 0.5)))
    with pytest.raises(ValidationError, match=r"reaches 4096 tokens.* is 2048"):
        TrainWorkload(**whole, length_schedule=((512, 0.5), (4096, 0.5)))

    for name, value in (
        ("input_tokens", 0),
        ("output_tokens", -1),
        ("concurrency", 0),
        ("prefix_share_ratio", 1.0),
    ):
        with pytest.raises(ValidationError, match=name):
            ask(workload={**SERVE, name: value})


def test_a_cluster_of_more_devices_than_any_is_refused_by_both_numbers():
    mixed = {"device": "rtx-2080-ti", "devices_per_node": 4, "nodes": 2}
    others = [{"device": "quadro-rtx-8000", "devices_per_node": 10**12}, {"device": "mi210"}]
    for cluster, words in (
        ({**mixed, "other_nodes": others}, "1000000000009 devices in all"),
        ({**mixed, "nodes": 500_001}, "2000004 devices in all"),
    ):
        with pytest.raises(BadRequestError, match=f"^cluster: the nodes have {words}") as caught:
            parse_model(EstimateRequest, json.dumps(document(cluster=cluster)))
        assert "at most 2000000: lower devices_per_node or nodes" in str(caught.value)
        assert caught.value.field == "cluster"


def test_a_wrong_name_or_type_is_refused_by_its_field_with_the_nearest():
    with pytest.raises(ValidationError, match="tensor_paralel_size"):
        ask(strategy={"tensor_paralel_size": 2})

    with pytest.raises(UnknownDeviceError) as device:
        ask(device="h100-sxm-90gb")
    with pytest.raises(UnknownModelError) as model:
        ask(model="meta-llama/Llama-3.1-8")

    assert "h100-sxm-80gb" in device.value.nearest
    assert model.value.nearest[0].lower() == LLAMA_8B.lower()
    assert ask(model=model.value.nearest[0]).fits
    assert device.value.field == "cluster.device"
    assert model.value.field == "model"

    for fields, field, nearest in (
        ({"strategy": {"tensor_paralel_size": 2}}, "strategy.tensor_paralel_size", "tensor_par"),
        ({"workload": {**SERVE, "input_toks": 2}}, "workload.input_toks", "input_tokens"),
        ({"strategy": {"offload": {"weights_gpu": 1}}}, "weights_gpu", "weights_cpu"),
    ):
        with pytest.raises(BadRequestError, match=nearest) as caught:
            parse_model(EstimateRequest, json.dumps(document(**fields)))
        assert field in caught.value.field, (fields, field, nearest)

    with pytest.raises(BadRequestError) as caught:
        parse_model(EstimateRequest, json.dumps(document(model=[1])))
    assert caught.value.field == "model"

    with pytest.raises(UnknownDeviceError) as caught:
        ask(device="h999")
    assert "h200" in caught.value.nearest

    with pytest.raises(BadRequestError, match="nearest: gptq"):
        ask(strategy={"quantization": "gptqx"})

    with pytest.raises(BadRequestError, match="nvfp4") as caught:
        parse_model(EstimateRequest, json.dumps(document(strategy={"weight_dtype": "fp6"})))
    assert caught.value.field == "strategy.weight_dtype"


def test_a_tiny_model_takes_as_many_stages_as_it_has_layers_and_no_more():
    found = ask(model=TINY, devices=6, strategy={"pipeline_parallel_size": 6})
    assert len(found.memory.per_stage_peak_bytes) == 6
    with pytest.raises(NotPossibleError, match="only 6 layers"):
        ask(model=TINY, devices=7, strategy={"pipeline_parallel_size": 7})


def test_defaults_are_filled_in_as_checkpoint_and_engine_have_them():
    strategy = ask(devices=4, strategy={"tensor_parallel_size": 2}).strategy
    assert strategy.data_parallel_size == 2
    assert strategy.weight_dtype == "bf16"
    assert strategy.kv_cache_dtype == "bf16"

    strategy = ask(model="nvidia/Llama-3.1-8B-Instruct-FP8", engine="vllm").strategy
    assert (strategy.weight_dtype, strategy.activation_dtype) == ("fp8", "fp8")

    request = {"strategy": {"weight_dtype": "fp8"}}
    assert ask(**request, engine="tensorrt_llm").strategy.kv_cache_dtype == "fp8"
    assert ask(**request, engine="vllm").strategy.kv_cache_dtype == "bf16"
    assert ask(strategy={"weight_dtype": "int4"}).strategy.group_size == 64
    assert ask(strategy={"weight_dtype": "int4"}, engine="vllm").strategy.group_size == 128
    assert ask(workload=TRAIN).strategy.weight_dtype == "fp32"
    assert ask(workload=TRAIN, engine="megatron").strategy.weight_dtype == "bf16"


def test_a_layout_that_does_not_fit_cluster_or_model_is_refused_or_warned_about():
    with pytest.raises(NotPossibleError, match=r"take 8 devices, the cluster has 4"):
        ask(devices=4, strategy={"tensor_parallel_size": 8})

    found = ask(devices=4, strategy={"tensor_parallel_size": 1, "data_parallel_size": 1})
    assert "3 of 4 devices stay unused" in found.warnings

    with pytest.raises(NotPossibleError, match="must divide the 32 attention heads"):
        ask(devices=3, strategy={"tensor_parallel_size": 3})

    with pytest.raises(NotPossibleError, match="only 6 layers"):
        ask(model=TINY, devices=8, strategy={"pipeline_parallel_size": 8})

    with pytest.raises(NotPossibleError, match="dense"):
        ask(devices=2, strategy={"expert_parallel_size": 2, "tensor_parallel_size": 2})

    strategy = {"expert_parallel_size": 3, "tensor_parallel_size": 4}
    with pytest.raises(NotPossibleError, match="must divide the 8 experts"):
        ask(model=MIXTRAL, devices=4, strategy=strategy)


def test_peaks_and_links_are_those_of_the_device_or_of_the_request():
    device = {"id": "my-chip", "memory_bytes": 2**36, "memory_bandwidth_bytes_per_second": 1e12}
    with pytest.raises(BadRequestError, match="my-chip"):
        ask(device=device)

    fp8 = ask(device="a100", strategy={"weight_dtype": "fp8"}, engine="vllm")
    bf16 = ask(device="a100", engine="vllm")
    assert fp8.performance.prefill_seconds == pytest.approx(
        bf16.performance.prefill_seconds, rel=0.1
    )

    base = {"device": "h100", "devices_per_node": 8}
    slow = {**base, "intra_node_bandwidth_bytes_per_second": 10e9}
    strategy = {"tensor_parallel_size": 8}
    near = ask(cluster=base, strategy=strategy).performance
    far = ask(cluster=slow, strategy=strategy).performance
    assert far.prefill_seconds > near.prefill_seconds


def test_an_offload_is_refused_where_there_is_nothing_that_it_moves():
    for name in ("kv_cpu", "kv_disk"):
        with pytest.raises(NotCoveredError, match=rf"offload\.{name} is 0.5: .* when training"):
            ask(workload=TRAIN, devices=8, strategy={"offload": {name: 0.5}})

    for workload in (SERVE, GENERATE):
        with pytest.raises(NotCoveredError, match=r"offload\.optimizer is 'cpu'"):
            ask(workload=workload, strategy={"offload": {"optimizer": "cpu"}})

    # A CPU computes from the host's memory, and Slipway's trainer moves the moments of AdamW.
    on_cpu = {"cluster": {"device": "cpu-xeon-8480-2s"}, "engine": "torch"}
    refused = [
        (TRAIN, {"optimizer": "cpu"}, r"offload\.optimizer is 'cpu': .* is a CPU"),
        (TRAIN, {"activations_cpu": 1.0}, r"offload\.activations_cpu is 1.0: .* is a CPU"),
        (GENERATE, {"weights_cpu": 0.5}, r"offload\.weights_cpu is 0.5: .* is a CPU"),
    ]
    for workload, offload, words in refused:
        for way in (ask, search):
            chosen = {("strategy" if way is ask else "pins"): {"offload": offload}}
            with pytest.raises(NotPossibleError, match=words):
                way(workload=workload, **on_cpu, **chosen)
    assert ask(workload=TRAIN, **on_cpu, strategy={"offload": {"optimizer": "nvme"}}).memory
    with pytest.raises(NotPossibleError, match="moves the two moments of adamw"):
        ask(
            workload={**TRAIN, "optimizer": "lion"},
            engine="torch",
            strategy={"offload": {"optimizer": "cpu"}},
        )

    nothing = {"offload": {"weights_cpu": 0.0, "optimizer": "none"}}
    assert ask(workload=TRAIN, devices=8, strategy=nothing).strategy.offload is not None
    assert ask(workload=GENERATE, strategy=nothing).fits


DEVICES = 64
SIZES = {
    "data_parallel_size": st.integers(1, 12),
    "tensor_parallel_size": st.integers(1, 12),
    "context_parallel_size": st.integers(1, 5),
    "expert_parallel_size": st.integers(1, 9),
    "micro_batch_size": st.integers(1, 6),
    "virtual_pipeline_size": st.integers(1, 12),
    "zero_stage": st.integers(0, 3),
    "zero_shard_size": st.sampled_from([None, 2, 3, 8]),
}
LAYOUTS = st.fixed_dictionaries(SIZES)


def rules_of(model, workload, sizes, stages, schedule):
    """Return the rules of one layout, its numbers as columns of one row."""
    columns = {name: np.array([float(value or 0)]) for name, value in sizes.items()}
    data, micro = columns["data_parallel_size"], columns["micro_batch_size"]
    layout = Layout(
        data=data,
        tensor=columns["tensor_parallel_size"],
        pipeline=stages,
        expert=columns["expert_parallel_size"],
        context=columns["context_parallel_size"],
        micro_batch=micro,
        micro_batches=workload.global_batch_size / data / micro,
        chunks=columns["virtual_pipeline_size"],
        zero_stage=columns["zero_stage"],
        sequence_parallel=columns["tensor_parallel_size"] > 1,
        shard=columns["zero_shard_size"],
    )
    yield from rank_rules(model, DEVICES, layout)
    yield from batch_rules(workload, data, micro)
    yield from training_rules(model, workload, layout, schedule)
    engine, strategy = get_engine("megatron", "gpu", training=True), Strategy()
    yield from option_rules(model, workload, engine, strategy, layout)


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from([LLAMA_70B, MIXTRAL]),
    sizes=LAYOUTS,
    stages=st.sampled_from([1, 2, 8, 96]),
    schedule=st.sampled_from(["1f1b", "interleaved", "zero_bubble"]),
    batch=st.sampled_from([8, 24, 64]),
)
def test_a_layout_is_masked_exactly_where_the_exact_door_refuses_it(
    name, sizes, stages, schedule, batch
):
    workload = TrainWorkload(sequence_length=4096, global_batch_size=batch)
    rules = rules_of(get_model(name), workload, sizes, stages, schedule)
    allowed = bool(np.all(rules_mask(rules)))
    strategy = {**sizes, "pipeline_parallel_size": stages, "pipeline_schedule": schedule}

    try:
        ask(model=name, devices=DEVICES, workload=workload, strategy=strategy, engine="megatron")
    except NotPossibleError:
        assert not allowed
    else:
        assert allowed


def test_the_first_rule_that_does_not_hold_is_named_and_heads_are_never_cut():
    rules = [Rule(True, "a", str), Rule(False, "b", lambda: "no"), Rule(False, "c", str)]
    with pytest.raises(NotPossibleError, match="no") as caught:
        check_rules(rules)
    assert caught.value.field == "b"
    for size in (3, 5, 6, 7):
        with pytest.raises(NotPossibleError, match="must divide the 64 attention heads"):
            ask(model=LLAMA_70B, devices=8, strategy={"tensor_parallel_size": size})


@given(flags=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=4))
def test_a_mask_holds_where_every_rule_holds(flags):
    rules = [Rule(np.array(column), "", str) for column in flags]
    assert np.all(rules_mask(rules) == np.array(flags).all(axis=0))
