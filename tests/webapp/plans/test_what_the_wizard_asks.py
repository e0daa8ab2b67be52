"""A draft of the wizard as the planner's question and in words: each choice as it says."""

import copy

import pytest

from planner.specs.estimate import PlanRequest
from planner.specs.workload import Strategy
from runners.plans.document import GOALS, PLANS, HardwareChoice, ModelChoice, PlanDocument
from runners.plans.fields import shown_of
from runners.plans.refusals import DraftProblem
from tests.webapp.conftest import client_of
from webapp.core.display import NBSP, THIN, TIMES, capitalised
from webapp.hosts.models import Host
from webapp.modelhub.models import TeamModel, demo_config
from webapp.plans.explanation import (
    device_words,
    dtype_words,
    hardware_words,
    model_words,
    plan_title,
    strategy_words,
    workload_words,
)
from webapp.plans.models import Plan
from webapp.plans.places import draft_shape, question_of
from webapp.plans.planning import plan_compute
from webapp.wizard.drafts import (
    draft_begin,
    goal_change,
    suggestion_apply,
)

pytestmark = pytest.mark.django_db(databases="__all__")
TARGETS = shown_of(PlanDocument.model_fields["latency_target"]).choices


@pytest.fixture
def plan(serve_plan) -> Plan:
    """A plan to serve the demo model on the host."""
    return serve_plan


def asked(plan: Plan, goal: str, **values) -> PlanRequest:
    """The question of a plan with another goal and some fields of that goal's form."""
    goal_change(plan, goal)
    plan.draft["workload"] |= values
    return question_of(plan).request


def on_catalog(plan: Plan, **changes) -> Plan:
    plan.draft["hardware"] |= {"host": None, "device": "rtx-4090", **changes}
    return plan


def refusal(plan: Plan) -> DraftProblem:
    with pytest.raises(DraftProblem) as caught:
        question_of(plan)
    return caught.value


def test_asking_changes_no_draft_and_a_stored_question_is_the_same(plan):
    for goal in GOALS:
        goal_change(plan, goal)
        before = copy.deepcopy(plan.draft)
        question_of(plan)
        assert plan.draft == before, goal

    for goal in GOALS:
        request = asked(plan, goal)
        stored = request.model_dump(mode="json")
        assert PlanRequest.model_validate(stored).model_dump(mode="json") == stored, goal


# Hardware


def test_a_host_is_asked_about_as_it_was_measured_and_again_where_it_was_not(plan, host):
    device = asked(plan, "serve").cluster.device
    assert host.name in device.source
    assert device.memory_bandwidth_bytes_per_second == 12e9

    Host.objects.filter(pk=host.pk).update(microbench={})
    problem = refusal(plan)
    assert (problem.field, problem.is_passing) == ("host", True)


# Models


def test_a_catalog_model_is_asked_by_its_name_and_a_config_as_it_was_pasted(plan):
    plan.draft["model"] = {"source": "catalog", "catalog_id": "openai-community/gpt2"}
    assert asked(plan, "serve").model == "openai-community/gpt2"

    for source in ["config", "folder"]:
        config = {**demo_config(), "vocab_size": 1234}
        plan.draft["model"] = {"source": source, "config": config, "path": "here"}
        assert asked(plan, "serve").model == config, source


def test_another_teams_host_or_model_is_refused_like_one_that_is_gone(plan, other_team, host):
    model = TeamModel.objects.create(team=other_team, name="theirs", config=demo_config())
    usual, plan.draft["model"] = plan.draft["model"], {"source": "team", "team_model": model.pk}
    foreign = refusal(plan)
    model.delete()
    assert refusal(plan) == foreign
    assert (foreign.field, draft_shape(plan)) == ("model", None)

    plan.draft["model"] = usual
    Host.objects.filter(pk=host.pk).update(team=other_team)
    foreign = refusal(plan)
    Host.objects.filter(pk=host.pk).delete()
    assert refusal(plan) == foreign
    assert foreign.field == "host"
    assert "Choose another" in str(foreign)


def test_the_shape_of_a_draft_is_that_of_its_model_if_it_is_there(plan):
    shape = draft_shape(plan)
    assert shape.num_hidden_layers == demo_config()["num_hidden_layers"]
    assert shape.vocab_size == demo_config()["vocab_size"]
    plan.draft["model"] = {"source": "catalog", "catalog_id": "nobody/nothing"}
    assert draft_shape(plan) is None


# Values that the planner refuses


def test_a_refused_value_is_said_with_its_field_on_the_page_too(plan, alice):
    values = plan.draft["workload"]
    for field, value in (("concurrency", 0), ("input_tokens", -5), ("output_tokens", "many")):
        usual, values[field] = values[field], value
        problem = refusal(plan)
        assert problem.field == field
        assert f"workload.{field} is not valid today" in str(problem)
        assert f"(it is {value})" in str(problem)
        values[field] = usual

    values["concurrency"] = 0
    plan.save()
    answer = client_of(alice).get(f"/plans/{plan.pk}/")
    assert answer.status_code == 200
    words = "workload.concurrency is not valid today: Input should be greater than or equal to 1"
    assert words in answer.content.decode()


# Drafts, strategies, hardware and formats in words


def spaced(words: str) -> str:
    return words.replace("_", THIN).replace("~", NBSP).replace("*", TIMES)


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


def test_a_workload_is_said_in_a_few_words():
    for goal, changes, words in [
        ("serve", {"concurrency": 1}, "1 request · 1_280 tokens each"),
        (
            "serve",
            {"concurrency": 16, "input_tokens": 131_072},
            "16 requests · 131_328 tokens each",
        ),
        ("generate", {"batch_size": 32}, "batch of 32"),
        ("pretrain", {"time_budget_seconds": 120}, "2 * 256 tokens · 2 min"),
        ("pretrain", {"time_budget_seconds": 40}, "2 * 256 tokens · 40 s"),
        ("pretrain", {"time_budget_seconds": 5430}, "2 * 256 tokens · 1 h 30 min"),
        ("pretrain", {"time_budget_seconds": 240_000}, "2 * 256 tokens · 2 d 18 h"),
        ("finetune", {"tokens": 10_000_000}, "16 * 2_048 tokens · 10.0~M tokens"),
        ("finetune", {"tokens": 10**12}, "16 * 2_048 tokens · 1.00~T tokens"),
        ("finetune", {"tokens": 204_800}, "16 * 2_048 tokens · 205~k tokens"),
        (
            "finetune",
            {"tokens": 204_800, "objective": "distillation", "teacher_model": "org/Large-70B"},
            "Distillation from Large-70B · 16 * 2_048 tokens · 205~k tokens",
        ),
        ("compress", {"method": "awq"}, "AWQ"),
        ("compress", {"method": "int4_weight_only"}, "4-bit weights"),
    ]:
        document = PLANS[goal](goal=goal, workload=changes)
        assert workload_words(document.workload) == spaced(words), (goal, changes)


def test_a_model_is_called_by_its_short_name():
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
        assert model_words(ModelChoice(**model)) == words, model


def test_hardware_is_said_by_number_and_name_or_its_own():
    for changes, words in [
        ({"device": "rtx-4090"}, "RTX 4090"),
        ({"device": "h100-sxm5-80gb", "devices_per_node": 8}, "8 * H100 SXM5 80GB"),
        ({"device": "h100-sxm5-80gb", "devices_per_node": 8, "nodes": 2}, "16 * H100 SXM5 80GB"),
        ({"device": "a-card-that-left-the-catalog"}, "a-card-that-left-the-catalog"),
    ]:
        assert hardware_words(HardwareChoice(**changes)) == spaced(words), changes
    assert hardware_words(HardwareChoice(), "Box") == "Box"
    assert device_words("rtx-4090") == "RTX 4090"


def test_a_plans_own_name_fits_its_column():
    for goal in GOALS:
        assert len(plan_title(goal, "m" * 200, "h" * 200)) == 120, goal


def test_a_dtype_is_said_as_people_say_it_and_only_a_first_letter_raised():
    for dtype, words in [("bf16", "BF16"), ("int4", "INT4"), ("mxfp4", "MXFP4"), (None, "")]:
        assert dtype_words(dtype) == words, dtype

    assert capitalised("needs vLLM") == "Needs vLLM"
    assert capitalised("") == ""


# A limit on what the planner may fill of each device: asked for, kept, lifted


@pytest.fixture
def limited(team, alice, host):
    return draft_begin(team=team, owner=alice, preset="demo", model=None)


def test_a_limit_is_a_constraint_on_the_peak_until_it_is_lifted(limited):
    assert question_of(limited).request.constraints == {}

    limited.draft["hardware"]["memory_limit_gib"] = 0.5
    answer = plan_compute(limited)
    assert all(each.memory.per_device_peak_bytes <= 2**29 for each in answer.plans)
    assert limited.request["constraints"] == {"per_device_peak_bytes": {"max": 2**29}}

    limited.draft["hardware"]["memory_limit_gib"] = 0.5
    left = suggestion_apply(limited, {"constraints": {}})
    assert (left, limited.draft["hardware"]["memory_limit_gib"]) == ([], None)


def test_the_hardware_step_asks_for_the_topology_of_catalog_hardware(limited, alice):
    sent = {"choice": "catalog", "device": "gb200-nvl72", "devices_per_node": 1, "nodes": 18}
    sent |= {"topology": "gb200-nvl72", "nvlink_domain_devices": "36"}
    path = f"/plans/{limited.pk}/edit/hardware/"
    client_of(alice).post(path, sent)
    limited.refresh_from_db()
    hardware = limited.document.hardware
    assert (hardware.topology, hardware.nvlink_domain_devices) == ("gb200-nvl72", 36)
    assert hardware.devices_per_node == 4, "those of a tray"

    answer = client_of(alice).post(path, {**sent, "device": "rtx-4090"})
    assert (answer.status_code, b"The topology NVIDIA GB200 NVL72" in answer.content) == (
        422,
        True,
    )


def test_the_hardware_step_asks_for_it_and_refuses_what_is_no_size(limited, alice):
    sent = {"choice": f"host:{limited.document.hardware.host}", "device": "rtx-4090"}
    sent |= {"devices_per_node": 1, "nodes": 1, "memory_limit_gib": "1.5"}
    client_of(alice).post(f"/plans/{limited.pk}/edit/hardware/", sent)
    limited.refresh_from_db()
    assert limited.draft["hardware"]["memory_limit_gib"] == 1.5

    sent = {"choice": "catalog", "device": "rtx-4090", "devices_per_node": 1, "nodes": 1}
    answer = client_of(alice).post(
        f"/plans/{limited.pk}/edit/hardware/", {**sent, "memory_limit_gib": "-1"}
    )
    assert (answer.status_code, b"Memory limit is -1" in answer.content) == (422, True)
