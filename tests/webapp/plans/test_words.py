"""Drafts, strategies, hardware and formats in words."""

import pytest

from planner.specs.workload import Strategy
from webapp.core.units import NBSP, THIN, TIMES
from webapp.core.wording import capitalised
from webapp.plans.words import (
    FIELD_WORDS,
    device_words,
    dtype_words,
    hardware_words,
    model_words,
    plan_title,
    strategy_words,
    workload_words,
)
from webapp.wizard.drafts import GOALS, serve_draft
from webapp.wizard.forms import GoalForm, HardwareForm, ModelForm, PinsForm
from webapp.wizard.workload_forms import WORKLOAD_FORMS


def spaced(words: str) -> str:
    return words.replace("_", THIN).replace("~", NBSP).replace("*", TIMES)


@pytest.fixture
def draft():
    return serve_draft(None)


def test_a_strategy_is_said_by_what_is_special_about_it():
    for fields, words in [
        ({"weight_dtype": "bf16"}, "BF16 weights"),
        ({"weight_dtype": "int4"}, "INT4 weights"),
        ({"weight_dtype": "int8", "kv_cache_dtype": "fp8"}, "INT8 weights · FP8 KV cache"),
        (
            {"weight_dtype": "bf16", "kv_cache_dtype": "bf16", "activation_dtype": "bf16"},
            "BF16 weights",
        ),
        ({"weight_dtype": "bf16", "tensor_parallel_size": 1}, "BF16 weights"),
        (
            {"weight_dtype": "fp8", "tensor_parallel_size": 8, "pipeline_parallel_size": 2},
            "FP8 weights · tensor parallel * 8 · pipeline parallel * 2",
        ),
        ({"weight_dtype": "bf16", "zero_stage": 3}, "BF16 weights · ZeRO-3"),
        ({"weight_dtype": "bf16", "zero_stage": 0}, "BF16 weights"),
        (
            {"weight_dtype": "bf16", "gradient_accumulation_steps": 16},
            "BF16 weights · 16 accumulation steps",
        ),
        (
            {"weight_dtype": "fp32", "activation_recomputation": "full"},
            "FP32 weights · full recomputation",
        ),
        ({"weight_dtype": "fp32", "activation_recomputation": "none"}, "FP32 weights"),
        (
            {"weight_dtype": "bf16", "offload": {"optimizer": "nvme", "weights_disk": 1.0}},
            "BF16 weights · 100% of weights on disk · optimiser on disk",
        ),
        (
            {"weight_dtype": "bf16", "offload": {"optimizer": "cpu", "activations_cpu": 0.5}},
            "BF16 weights · 50% of activations in host memory · optimiser in host memory",
        ),
        (
            {"weight_dtype": "int4", "offload": {"kv_disk": 0.25, "weights_cpu": 1.0}},
            "INT4 weights · 100% of weights in host memory · 25% of KV cache on disk",
        ),
    ]:
        assert strategy_words(Strategy.model_validate(fields)) == spaced(words), fields


def test_a_workload_is_said_in_a_few_words(draft):
    for goal, changes, words in [
        ("serve", {"concurrency": 1}, "1 person · 1_280 tokens each"),
        ("serve", {"concurrency": 16, "input_tokens": 131_072}, "16 people · 131_328 tokens each"),
        ("generate", {"batch_size": 32}, "batch of 32"),
        ("pretrain", {"time_budget_minutes": 2.0}, "2 * 256 tokens · 2 min"),
        ("pretrain", {"time_budget_minutes": 40 / 60}, "2 * 256 tokens · 40 s"),
        ("pretrain", {"time_budget_minutes": 90.5}, "2 * 256 tokens · 1 h 30 min"),
        ("pretrain", {"time_budget_minutes": 4000}, "2 * 256 tokens · 2 d 18 h"),
        ("finetune", {"million_tokens": 10.0}, "16 * 2_048 tokens · 10.0~M tokens"),
        ("finetune", {"million_tokens": 1e6}, "16 * 2_048 tokens · 1.00~T tokens"),
        ("finetune", {"million_tokens": 0.2048}, "16 * 2_048 tokens · 205~k tokens"),
        ("compress", {"method": "awq"}, "AWQ"),
        ("compress", {"method": "int4_weight_only"}, "4-bit weights"),
    ]:
        draft["goal"]["goal"] = goal
        draft["workload"][goal] |= changes
        assert workload_words(draft) == spaced(words), (goal, changes)


def test_a_model_is_called_by_its_short_name(draft):
    for model, words in [
        ({"source": "demo"}, "Slipway demo"),
        ({"source": "catalog", "catalog_id": "meta-llama/Llama-3.1-8B"}, "Llama 3.1 8B"),
        ({"source": "folder", "path": "models/tiny/"}, "tiny"),
        ({"source": "folder", "path": ""}, "folder"),
        ({"source": "config", "config": {"model_type": "llama"}}, "llama"),
        ({"source": "config", "config": {"_name_or_path": "org/x", "model_type": "l"}}, "org/x"),
        ({"source": "config", "config": {}}, "pasted config"),
        ({"source": "team", "team_model": "1"}, "a model of the team"),
    ]:
        draft["model"] = model
        assert model_words(draft) == words, model


def test_hardware_is_said_by_number_and_name_or_its_own(draft):
    for changes, words in [
        ({"device": "rtx-4090"}, "RTX 4090"),
        ({"device": "h100-sxm5-80gb", "devices_per_node": 8}, "8 * H100 SXM5 80GB"),
        ({"device": "h100-sxm5-80gb", "devices_per_node": 8, "nodes": 2}, "16 * H100 SXM5 80GB"),
        ({"device": "a-card-that-left-the-catalog"}, "a-card-that-left-the-catalog"),
    ]:
        draft = serve_draft(None)
        draft["hardware"] |= changes
        assert hardware_words(draft) == spaced(words), changes
    assert hardware_words(draft, "Box") == "Box"
    assert device_words("rtx-4090") == "RTX 4090"


def test_a_plans_own_name_fits_its_column(draft):
    for goal in GOALS:
        draft["goal"]["goal"] = goal
        assert len(plan_title(draft, "m" * 200, "h" * 200)) == 120, goal


def test_a_dtype_is_said_as_people_say_it_and_only_a_first_letter_raised():
    for dtype, words in [("bf16", "BF16"), ("int4", "INT4"), ("mxfp4", "MXFP4"), (None, "")]:
        assert dtype_words(dtype) == words, dtype

    assert capitalised("needs vLLM") == "Needs vLLM"
    assert capitalised("") == ""


def test_fields_are_named_as_the_wizards_forms_label_them():
    forms = [GoalForm, HardwareForm, PinsForm, ModelForm, *WORKLOAD_FORMS.values()]
    labels = {name: str(field.label) for form in forms for name, field in form.base_fields.items()}
    assert {name: labels[name] for name in FIELD_WORDS} == FIELD_WORDS
