"""What the planner refuses: the error names the field, its value, the limit and a way out."""

import json

import pytest
from pydantic import ValidationError

from planner.__main__ import parsed
from planner.errors import (
    BadRequestError,
    NotCoveredError,
    NotPossibleError,
    UnknownDeviceError,
    UnknownModelError,
)
from planner.specs.estimate import EstimateRequest
from planner.specs.workload import ServeWorkload, TrainWorkload
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


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_layout_is_refused_by_its_field_with_both_numbers(name):
    fields, field, words = IMPOSSIBLE[name]

    with pytest.raises(NotPossibleError) as caught:
        ask(**fields)

    assert caught.value.field.split(".")[-1] == field
    assert caught.value.code == "not_possible"
    for word in words:
        assert word in caught.value.message


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


@pytest.mark.parametrize("name", UNCOVERED)
def test_what_has_no_formula_is_refused_by_its_field_and_can_be_left_out(name):
    fields, field, word = UNCOVERED[name]

    with pytest.raises(NotCoveredError) as caught:
        ask(**fields)

    assert caught.value.field == f"strategy.{field}"
    assert word in caught.value.message
    assert caught.value.to_json()["code"] == "not_covered"
    assert "leave it out" in caught.value.message or "choose among" in caught.value.message


@pytest.mark.parametrize("name", ["sparse training", "an unheard-of format"])
def test_a_pin_without_a_formula_is_refused_by_the_search_as_well(name):
    fields, field, word = UNCOVERED[name]
    pinned = {key: value for key, value in fields.items() if key != "strategy"}

    with pytest.raises(NotCoveredError, match=word) as caught:
        search(**pinned, pins=fields["strategy"])

    assert caught.value.field.endswith(field)


def test_a_search_whose_every_layout_is_impossible_says_why():
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


@pytest.mark.parametrize("bits", [1, 5, 6, 7, 12])
def test_bits_without_a_format_are_refused_with_those_that_have_one(bits):
    with pytest.raises(BadRequestError, match="2, 3, 4, 8 or 16") as caught:
        ask(workload={**COMPRESS, "bits": bits})

    assert caught.value.field == "workload.bits"
    assert f"bits is {bits}" in caught.value.message


@pytest.mark.parametrize("bits", [0, 17])
def test_bits_outside_of_a_byte_pair_are_no_request(bits):
    with pytest.raises(ValidationError, match="bits"):
        ask(workload={**COMPRESS, "bits": bits})


def test_packing_of_experts_needs_experts():
    packed = {"kind": "compress", "method": "qmoe"}

    with pytest.raises(NotPossibleError, match=LLAMA_70B) as caught:
        ask(model=LLAMA_70B, workload=packed)

    assert caught.value.field == "workload.method"
    assert ask(model=MIXTRAL, devices=8, workload=packed).performance.duration_seconds > 0


@pytest.mark.parametrize(
    "loads",
    [
        {"concurrency": 4, "request_rate_per_second": 1.0},
        {"concurrency": 4, "burst_requests": 4},
        {"request_rate_per_second": 1.0, "burst_requests": 4},
    ],
)
def test_requests_arrive_in_one_way_only(loads):
    with pytest.raises(ValidationError, match="exclude each other: give one, or none"):
        ServeWorkload(input_tokens=10, output_tokens=10, **loads)


def test_shares_of_a_schedule_are_a_whole_and_no_longer_than_the_longest():
    whole = {"sequence_length": 2048, "global_batch_size": 8}

    with pytest.raises(ValidationError, match=r"add up to 0\.9, not 1"):
        TrainWorkload(**whole, length_schedule=((512, 0.4), (2048, 0.5)))
    with pytest.raises(ValidationError, match=r"reaches 4096 tokens.* is 2048"):
        TrainWorkload(**whole, length_schedule=((512, 0.5), (4096, 0.5)))


@pytest.mark.parametrize(
    ("name", "value"),
    [("input_tokens", 0), ("output_tokens", -1), ("concurrency", 0), ("prefix_share_ratio", 1.0)],
)
def test_a_load_out_of_its_range_is_refused_by_its_name(name, value):
    with pytest.raises(ValidationError, match=name):
        ask(workload={**SERVE, name: value})


def test_a_misspelt_field_is_not_silently_ignored():
    with pytest.raises(ValidationError, match="tensor_paralel_size"):
        ask(strategy={"tensor_paralel_size": 2})


def test_a_misspelt_name_is_answered_with_the_nearest_ones():
    with pytest.raises(UnknownDeviceError) as device:
        ask(device="h100-sxm-80g")
    with pytest.raises(UnknownModelError) as model:
        ask(model="meta-llama/Llama-3.1-8")

    assert "h100-sxm-80gb" in device.value.nearest
    assert model.value.nearest[0].lower() == LLAMA_8B.lower()
    assert ask(model=model.value.nearest[0]).fits
    assert device.value.field == "cluster.device"
    assert model.value.field == "model"


def test_a_tiny_model_takes_as_many_stages_as_it_has_layers_and_no_more():
    found = ask(model=TINY, devices=6, strategy={"pipeline_parallel_size": 6})

    assert len(found.memory.per_stage_peak_bytes) == 6
    with pytest.raises(NotPossibleError, match="only 6 layers"):
        ask(model=TINY, devices=7, strategy={"pipeline_parallel_size": 7})


@pytest.mark.parametrize(
    ("fields", "field", "nearest"),
    [
        ({"strategy": {"tensor_paralel_size": 2}}, "strategy.tensor_paralel_size", "tensor_par"),
        ({"workload": {**SERVE, "input_toks": 2}}, "workload.input_toks", "input_tokens"),
        ({"strategy": {"offload": {"weights_gpu": 1}}}, "weights_gpu", "weights_cpu"),
    ],
)
def test_a_field_that_there_is_not_is_refused_with_its_nearest(fields, field, nearest):
    with pytest.raises(BadRequestError, match=nearest) as caught:
        parsed(EstimateRequest, json.dumps(document(**fields)))

    assert field in caught.value.field


def test_a_model_of_the_wrong_type_is_named_as_the_model():
    with pytest.raises(BadRequestError) as caught:
        parsed(EstimateRequest, json.dumps(document(model=[1])))

    assert caught.value.field == "model"


def test_every_unknown_device_is_refused_with_some_that_are_known():
    with pytest.raises(UnknownDeviceError) as caught:
        ask(device="h999")

    assert "h200" in caught.value.nearest


def test_an_unknown_quantisation_names_the_nearest():
    with pytest.raises(NotCoveredError, match="nearest: gptq"):
        ask(strategy={"quantization": "gptqx"})


def test_a_dtype_that_there_is_not_is_refused_as_a_dtype():
    with pytest.raises(BadRequestError, match="nvfp4") as caught:
        parsed(EstimateRequest, json.dumps(document(strategy={"weight_dtype": "fp6"})))

    assert caught.value.field == "strategy.weight_dtype"
