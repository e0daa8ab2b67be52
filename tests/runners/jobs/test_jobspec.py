"""What a spec allows, in words that name the field and the limit."""

import pytest
from pydantic import TypeAdapter, ValidationError

from runners.jobspec import (
    ArtefactModel,
    BenchmarkSpec,
    CompressSpec,
    JobSpec,
    ServeSpec,
    TrainSpec,
)

MODEL = ArtefactModel(attempt_id="a1")
SPECS = [
    TrainSpec(),
    CompressSpec(model=MODEL),
    BenchmarkSpec(model=MODEL),
    ServeSpec(model=MODEL),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_every_spec_survives_its_json(spec):
    adapter = TypeAdapter(JobSpec)

    assert adapter.validate_json(adapter.dump_json(spec)) == spec


def test_a_field_that_nobody_knows_is_refused():
    with pytest.raises(ValidationError, match="commandd"):
        TrainSpec(commandd="rm -rf /")


def test_training_without_an_end_is_refused_with_the_way_out():
    with pytest.raises(ValidationError, match="give max_steps or time_budget_seconds"):
        TrainSpec(max_steps=None, time_budget_seconds=None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"host": "0.0.0.0"}, "which others reach, but key_hashes is empty; give a key's hash"),
        ({"port": 80}, "port is 80; choose 1024 to 65535, or 0"),
        ({"kv_cache_tokens": 8, "max_length": 16}, "kv_cache_tokens is 8, less than max_length"),
        ({"host": "localhost; id"}, "host"),
        ({"key_hashes": ("sk-plain",)}, "key_hashes"),
        ({"served_name": "a\nb"}, "served_name"),
        ({"idle_stop_seconds": 0}, "idle_stop_seconds"),
        ({"engine": "vllm", "enforce_eager": True}, "enforce_eager is of slipway's own engine"),
    ],
)
def test_an_endpoint_that_is_open_or_cannot_be_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        ServeSpec(model=MODEL, **fields)


def test_the_demo_model_is_small_enough_for_two_minutes():
    demo = TrainSpec().model
    attention = demo.hidden_size**2 * (2 + 2 * demo.num_key_value_heads / demo.num_attention_heads)
    layer = attention + 3 * demo.hidden_size * demo.intermediate_size

    total = demo.num_hidden_layers * layer + 2 * demo.vocab_size * demo.hidden_size

    assert 2_000_000 < total < 15_000_000


@pytest.mark.parametrize(
    ("dtype", "method"), [("int8", "int8"), ("int4", "nf4"), ("bf16", "bf16")]
)
def test_a_quantisation_that_was_stored_before_reads_as_a_compression(dtype, method):
    stored = {"kind": "quantize", "model": MODEL.model_dump(), "weight_dtype": dtype, "seed": 3}

    spec = TypeAdapter(JobSpec).validate_python(stored)

    assert spec == CompressSpec(model=MODEL, method=method, seed=3)
    assert spec.weight_dtype == dtype


@pytest.mark.parametrize(
    ("fields", "loaded_as", "title"),
    [
        ({"method": "gptq", "bits": 3}, "int4", "gptq 3 bit"),
        ({"method": "rtn", "bits": 8}, "int8", "rtn 8 bit"),
        ({"method": "quantease", "bits": 3, "outlier_share": 0.01}, "bf16", "quantease 3 bit"),
        ({"method": "sparsegpt", "sparsity": 0.6}, "bf16", "sparsegpt 60%"),
        ({"method": "wanda", "pattern": "2:4"}, "bf16", "wanda 2:4"),
        ({"method": "int8"}, "int8", "int8"),
        ({"method": "smoothquant"}, "int8", "smoothquant 8 bit, 8 bit activations"),
        ({"method": "fptq"}, "int4", "fptq 4 bit, 8 bit activations"),
        ({"method": "norm_tweaking", "bits": 2}, "int4", "norm_tweaking 2 bit"),
        ({"method": "fp8"}, "fp8", "fp8"),
        ({"method": "sheared_llama", "sparsity": 0.2}, "bf16", "sheared_llama 20%"),
        ({"method": "qmoe"}, "int4", "QMoE, ternary experts"),
        ({"method": "int8_dynamic"}, "int8", "int8, 8 bit activations"),
        ({"method": "gguf", "gguf_type": "Q4_0"}, "bf16", "GGUF Q4_0"),
        ({"method": "llm_pruner", "sparsity": 0.2}, "bf16", "llm_pruner 20%"),
    ],
)
def test_a_compression_says_as_what_its_outcome_is_loaded(fields, loaded_as, title):
    spec = CompressSpec(model=MODEL, **fields)

    assert (spec.weight_dtype, spec.title) == (loaded_as, title)


def test_a_card_shows_no_setting_that_the_method_does_not_read():
    pruned = CompressSpec(model=MODEL, method="wanda", pattern="2:4").settings
    rounded = CompressSpec(model=MODEL, method="gptq", bits=3).settings
    smoothed = CompressSpec(model=MODEL, method="smoothquant").settings

    assert pruned == {"calibration_tokens": "16384", "pattern": "2:4"}
    assert smoothed == {"calibration_tokens": "16384", "bits": "8", "smoothing": "0.5"}
    assert rounded.keys() == {"calibration_tokens", "bits", "group_size", "act_order", "damping"}


@pytest.mark.parametrize(
    ("method", "phases"),
    [
        ("gptq", [("original_", "bf16"), ("", "bf16")]),
        ("fp8", [("original_", "bf16"), ("", "fp8")]),
        ("llm_pruner", [("original_", "bf16")]),
        ("smoothquant", [("original_", "bf16")]),
        ("int8_dynamic", [("original_", "bf16")]),
    ],
)
def test_a_planner_is_asked_about_no_model_of_another_shape(method, phases):
    assert list(CompressSpec(model=MODEL, method=method).predictable_phases) == phases


@pytest.mark.parametrize(
    ("fields", "divisor"),
    [
        ({"method": "gptq", "group_size": 32}, 32),
        ({"method": "finequant", "group_size": 32}, 1),
        ({"method": "smoothquant"}, 1),
        ({"method": "sparsegpt", "pattern": "2:4"}, 4),
    ],
)
def test_rows_need_divide_only_into_what_the_method_makes_of_them(fields, divisor):
    assert CompressSpec(model=MODEL, **fields).row_divisor == divisor
