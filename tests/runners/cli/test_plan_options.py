"""The options of ``slipway plan`` are fields of the request, in their words, where they apply."""

import json
import re
from random import Random
from typing import get_args

import pytest

from planner.api import estimate
from planner.catalog.engines import get_engine, list_engines
from planner.specs.base import PlannerError
from planner.specs.cluster import ClusterSpec
from planner.specs.estimate import FIGURES, EstimateRequest, PlanRequest
from planner.specs.on_policy import ON_POLICY
from planner.specs.workload import Strategy, TrainWorkload, Workload
from runners.cli.launch import OPTIONS
from runners.cli.option_fields import choices_of
from runners.cli.plan_options import GOALS, OF_KIND, WORKLOAD, field_of, options_of
from runners.cli.plan_request import build_document, request_of
from runners.plans.fields import shown_of
from runners.plans.launch import Launch
from tests.planner.laws.fields import value_of

MODEL, LLAMA, MIXTRAL = "llama-3.1-8b", "meta-llama/Llama-3.1-8B", "mistralai/Mixtral-8x7B-v0.1"
KINDS = {each.model_fields["kind"].default: each for each in get_args(get_args(Workload)[0])}
SAMPLES = {
    "N": "2", "N|max": "max", "TOKENS": "8K", "DURATION": "2s", "RATE": "2/s", "SHARE": "50%",
    "NUMBER": "0.5",
}  # fmt: skip
NAMES = {"engine": "vllm", "quantization": "awq"}  # of options that take any name


def every_option():
    return [(goal, option) for goal in GOALS for option in options_of(goal)]


def sample_of(goal, option):
    """Return a text of an option: the last of its choices, or one of its unit."""
    info = field_of(goal, option)
    choices = [str(each) for each in choices_of(info)]
    dtype = ["bf16"] if option.name.endswith("dtype") else choices
    (shown,) = option.parameter(info).annotation.__metadata__
    return [*dtype, NAMES.get(option.name) or SAMPLES.get(shown.metavar)][0]


def test_an_option_sets_a_field_that_exists_and_no_two_of_a_goal_have_one_name():
    for goal in GOALS:
        names = [each for option in options_of(goal) for each in option.names]
        assert len(set(names)) == len(names), goal
    for goal, option in every_option():
        text = sample_of(goal, option)
        made = build_document(goal, MODEL, {option.key: text}, hardware=["h100"])
        request = request_of(made.document).model_dump(mode="json")
        for part in option.field.split("."):
            request = request.get(part, {} if text == "max" else None)
        assert request is not None, (goal, option)
        assert made.options == {option.field: option.names[0]}


def test_the_help_of_an_option_is_the_words_choices_and_limits_of_its_field(slipway):
    rows = {
        (goal, re.match(r"--[\w-]+", row)[0]): " ".join(row.split())
        for goal in GOALS
        for row in slipway("plan", goal, "--help").out.split("\n  --")
        for row in [f"--{row}"]
    }
    for goal, option in every_option():
        info = field_of(goal, option)
        shown = rows[goal, option.names[0]]
        assert info.description in shown, (goal, option)
        assert [each for each in choices_of(info) if str(each) not in shown] == [], (goal, option)
    assert "How many plans to return (1 to 100; default 5)." in rows["serve", "--top"]
    assert "Tokens of a typical prompt (usually 1,024)." in rows["serve", "--input-len"]
    served = {
        name
        for name in list_engines()
        if get_engine(name, "gpu").role == "serving" or name in {"torch", "torchtitan", "megatron"}
    }
    assert [each for each in (*served, "auto") if each not in rows["serve", "--engine"]] == []


def test_the_options_of_a_launch_are_its_fields_in_their_words_and_shown_units(slipway):
    shown = " ".join(slipway("launch", "--help").out.split())
    for option in OPTIONS:
        field = shown_of(Launch.model_fields[option.field])
        words = field.help if field.factor == 1 else field.title
        assert re.search(rf"{option.names[0]} [^-]*{re.escape(words)}", shown), option
    assert "Time limit, in hours (0.01 to 8,784)." in shown
    assert "held-out text (job, endpoint, load or evaluation; default job)." in shown


def test_every_field_of_a_request_has_words_and_limits_that_json_schema_and_openapi_read():
    for spec in (PlanRequest, ClusterSpec, Strategy, *KINDS.values()):
        for name, field in spec.model_json_schema()["properties"].items():
            assert name == "kind" or len(field.get("description", "")) > 4, (spec, name)
            assert not field.get("description", "").endswith("."), (spec, name)
    assert [name for name, info in FIGURES.items() if not info.description] == []


@pytest.mark.parametrize("goal", GOALS)
def test_every_field_of_the_workload_and_the_strategy_is_reached_by_an_option_or_a_setting(goal):
    by_option = {option.field for option in options_of(goal)}
    draw = Random(goal)  # noqa: S311 (values, not secrets)
    made = build_document(goal, MODEL, {}, hardware=["h100"]).document["workload"]
    for part, spec in (("workload", KINDS[GOALS[goal].kind]), ("pins", Strategy)):
        for name in spec.model_fields:
            path = f"{part}.{name}"
            if name in {"kind", "concurrency"} or path in by_option:
                continue
            value = value_of(draw, spec, name, {**made})
            own = []
            if name == "precompute_reference":  # of a comparison alone
                own, value = ['workload.objective="dpo"'] * (goal == "tune"), goal == "tune"
            if (
                part == "workload"
                and KINDS[GOALS[goal].kind] is TrainWorkload
                and name in ON_POLICY
            ):
                if goal == "train":  # a pre-training learns from no rewards
                    continue
                own, value = ['workload.objective="grpo"'], ON_POLICY_VALUES.get(name, 2)
                if name == "teacher_model":
                    own = ['workload.objective="distillation"']
            setting = f"{path}={json.dumps(value)}"
            document = build_document(goal, MODEL, {}, hardware=["h100"], settings=[*own, setting])
            assert name in getattr(request_of(document.document), part).model_fields_set, setting


ON_POLICY_VALUES = {
    "generator": "separate", "reward_model": "llama-3.2-1b", "generation_batch_size": 64,
    "max_prompt_length": 512, "teacher_model": "qwen3-8b",
}  # fmt: skip
LENGTHS = {"input_tokens": 1024, "output_tokens": 256}
WORK = {
    "serve": {**LENGTHS, "concurrency": 64},
    "generate": {**LENGTHS, "batch_size": 512},
    "train": {"sequence_length": 2048, "global_batch_size": 64},
    "compress": {"method": "gptq", "bits": 4},
}
ENGINES = {"serve": ("vllm", "torch"), "generate": ("vllm", "torch")}
VALUES = {
    "weight_dtype": ("int4", "fp32"), "quantization": ("fp8", "gguf:q4_k_m"),
    "kv_cache_dtype": ("fp8",), "gpu_memory_utilization": (0.3,), "max_batch_tokens": (512,),
    "activation_recomputation": ("full", "none"), "zero_stage": (3,), "micro_batch_size": (1, 2),
}  # fmt: skip
CONSTRAINED = {"ttft_p95_seconds", "latency_p50_seconds", "quality_loss_ratio"}


def figures_of(kind, engine, model, strategy):
    """Return the names and values of the figures of a strategy, none if it is refused."""
    is_over_codes = kind == "train" and "quantization" in strategy
    over_codes = {"method": "qlora"} if is_over_codes else {}  # others refuse it
    request = {
        "model": model,
        "cluster": {"device": "h100", "devices_per_node": 4},
        "workload": {"kind": kind, **WORK[kind], **over_codes},
        "engine": engine,
        "strategy": strategy,
    }
    try:
        found = estimate(EstimateRequest.model_validate(request))
    except PlannerError:
        return {}
    quality = {"quality_loss_ratio": found.quality.loss_ratio} if found.quality else {}
    return {
        **found.performance.model_dump(),
        **quality,
        "peak": found.memory.per_device_peak_bytes,
    }


@pytest.mark.parametrize("kind", OF_KIND)
def test_a_goal_has_the_options_that_its_figures_depend_on_and_no_other(kind):
    offered = {option.field for option in OF_KIND[kind]}
    universe = {option.field for options in OF_KIND.values() for option in options}
    pins = {field.removeprefix("pins.") for field in universe if field.startswith("pins.")}
    cases = [
        (engine, model) for engine in ENGINES.get(kind, ("torch",)) for model in (LLAMA, MIXTRAL)
    ]
    usual = {case: figures_of(kind, *case, {}) for case in cases}
    limited: set[str] = set()
    for pin in pins:
        tried = (
            (usual[case], figures_of(kind, *case, {pin: value}))
            for case in cases
            for value in VALUES.get(pin, (2, 4))
        )
        applies = False
        for before, after in tried:
            limited |= after.keys()
            applies = applies or bool(after and after != before)
            if applies:
                break
        assert applies == (f"pins.{pin}" in offered), (kind, pin)
    constrained = {name for name in CONSTRAINED if f"constraints.{name}.max" in offered}
    assert constrained == CONSTRAINED & limited
    workloads = {option.name for option in WORKLOAD} & KINDS[kind].model_fields.keys()
    workloads -= set(ON_POLICY if kind == "train" else ())  # of one training objective
    for goal in (goal for goal, each in GOALS.items() if each.kind == kind):
        own = {option.name for option in options_of(goal) if option.field.startswith("workload.")}
        assert own == workloads, goal
        assert {option.field for option in options_of(goal)} >= offered
