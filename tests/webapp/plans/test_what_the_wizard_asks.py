"""A draft of the wizard as the planner's question: each choice becomes what its words say."""

import copy
import re

import pytest

from planner.specs.estimate import PlanRequest
from tests.webapp.conftest import client_of
from webapp.hosts.models import Host
from webapp.modelhub.models import TeamModel
from webapp.modelhub.shapes import demo_config
from webapp.plans.errors import DraftProblem
from webapp.plans.models import Plan
from webapp.plans.questions import draft_shape, question_of
from webapp.wizard.drafts import GOALS
from webapp.wizard.forms import SLOS

pytestmark = pytest.mark.django_db


@pytest.fixture
def plan(serve_plan) -> Plan:
    """A plan to serve the demo model on the host."""
    return serve_plan


def asked(plan: Plan, goal: str, **values) -> PlanRequest:
    """The question of a plan with another goal and some fields of that goal's form."""
    plan.draft["goal"]["goal"] = goal
    plan.draft["workload"][goal] |= values
    return question_of(plan).request


def on_catalog(plan: Plan, **changes) -> Plan:
    plan.draft["hardware"] |= {"choice": "catalog", "device": "rtx-4090", **changes}
    return plan


def refusal(plan: Plan) -> DraftProblem:
    with pytest.raises(DraftProblem) as caught:
        question_of(plan)
    return caught.value


# Workloads


def test_serving_asks_for_the_people_prompts_and_answers_of_the_form(plan):
    request = asked(plan, "serve", input_tokens=70, output_tokens=9, concurrency=3)

    workload = request.workload
    assert (workload.input_tokens, workload.output_tokens) == (70, 9)
    assert workload.concurrency == 3
    assert workload.request_rate_per_second is None


@pytest.mark.parametrize(("percent", "ratio"), [(0, 0.0), (1, 0.01), (50, 0.5), (99, 0.99)])
def test_a_shared_beginning_in_per_cent_is_asked_as_a_ratio(plan, percent, ratio):
    request = asked(plan, "serve", prefix_share_percent=percent)

    assert request.workload.prefix_share_ratio == pytest.approx(ratio)


@pytest.mark.parametrize("wish", ["chat", "code"])
def test_a_wish_for_speed_asks_what_its_words_promise(plan, wish):
    plan.draft["goal"]["slo"] = wish
    first, rate = re.findall(r"within ([\d.]+) s, then (\d+) tokens a second", dict(SLOS)[wish])[0]

    workload = asked(plan, "serve").workload

    assert workload.ttft_slo_seconds == float(first)
    assert round(1 / workload.tpot_slo_seconds) == int(rate)


def test_no_target_asks_for_no_speed(plan):
    plan.draft["goal"]["slo"] = "none"

    workload = asked(plan, "serve").workload

    assert (workload.ttft_slo_seconds, workload.tpot_slo_seconds) == (None, None)


def test_a_wish_for_speed_belongs_to_serving_alone(plan):
    plan.draft["goal"]["slo"] = "code"

    assert "slo" not in asked(plan, "generate").model_dump_json(exclude_none=True)


@pytest.mark.parametrize(("method", "rank"), [("full", None), ("lora", 24), ("qlora", 24)])
def test_only_adapters_are_asked_with_a_rank(plan, method, rank):
    workload = asked(plan, "finetune", method=method, lora_rank=24).workload

    assert (workload.method, workload.lora_rank) == (method, rank)


def test_pre_training_is_asked_whatever_method_fine_tuning_had(plan):
    plan.draft["workload"]["finetune"] |= {"method": "qlora", "lora_rank": 64}

    workload = asked(plan, "pretrain").workload

    assert (workload.method, workload.lora_rank) == ("pretrain", None)


@pytest.mark.parametrize(
    ("million", "tokens"), [(None, None), (0.001, 1000), (2.5, 2_500_000), (1e9, 10**15)]
)
def test_millions_of_tokens_are_asked_in_tokens(plan, million, tokens):
    assert asked(plan, "pretrain", million_tokens=million).workload.tokens == tokens


@pytest.mark.parametrize(
    ("method", "bits", "group_size"),
    [
        ("int8_weight_only", 8, None),
        ("int8_dynamic", 8, None),
        ("fp8", None, None),
        ("qmoe", None, None),
        ("gguf", 4, 32),
        ("sparsegpt", 16, None),
        ("llm_pruner", 16, None),
        ("int4_weight_only", 4, 32),
        ("nf4", 4, 32),
        ("gptq", 4, 32),
        ("awq", 4, 32),
    ],
)
def test_only_four_bit_weights_are_asked_in_groups(plan, method, bits, group_size):
    workload = asked(plan, "compress", method=method, group_size=32).workload

    assert (workload.bits, workload.group_size) == (bits, group_size)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_the_planner_is_asked_about_the_bits_that_were_chosen(plan, bits):
    coded = asked(plan, "compress", method="gptq", bits=bits).workload
    fixed = asked(plan, "compress", method="nf4", bits=bits).workload

    assert (coded.bits, fixed.bits) == (bits, 4)


def test_a_compression_loads_the_original_in_bf16_unless_it_is_pinned(plan):
    usual = asked(plan, "compress").pins.weight_dtype
    plan.draft["pins"] = {"weight_dtype": "fp32"}

    assert (usual, asked(plan, "compress").pins.weight_dtype) == ("bf16", "fp32")


# What is kept and what matters


def test_a_pin_that_is_left_to_the_planner_is_not_asked(plan):
    plan.draft["pins"] = {"weight_dtype": "", "tensor_parallel_size": None, "micro_batch_size": 4}

    pins = asked(plan, "generate").pins.model_dump(exclude_none=True)

    assert pins["micro_batch_size"] == 4
    assert not {"weight_dtype", "tensor_parallel_size"} & set(pins)


@pytest.mark.parametrize("objective", ["balanced", "cost", "energy"])
def test_what_matters_most_is_asked_by_its_name(plan, objective):
    plan.draft["goal"]["objective"] = objective

    assert asked(plan, "serve").objective == objective


@pytest.mark.parametrize("goal", GOALS)
def test_asking_changes_nothing_of_the_draft(plan, goal):
    plan.draft["goal"]["goal"] = goal
    before = copy.deepcopy(plan.draft)

    question_of(plan)

    assert plan.draft == before


@pytest.mark.parametrize("goal", GOALS)
def test_a_question_is_the_same_after_it_was_stored(plan, goal):
    request = asked(plan, goal)

    stored = request.model_dump(mode="json")

    assert PlanRequest.model_validate(stored).model_dump(mode="json") == stored


# Hardware


def test_thought_of_hardware_is_asked_by_device_and_number(plan):
    cluster = asked(on_catalog(plan, devices_per_node=4, nodes=2), "serve").cluster

    assert (cluster.device, cluster.devices_per_node, cluster.nodes) == ("rtx-4090", 4, 2)


@pytest.mark.parametrize(
    ("goal", "engine"),
    [("serve", "vllm"), ("generate", "vllm"), ("finetune", None), ("compress", None)],
)
def test_thought_of_hardware_answers_with_the_engine_that_people_run(plan, goal, engine):
    assert asked(on_catalog(plan), goal).engine == engine


@pytest.mark.parametrize("device", ["apple-m3-max", "p40"])
@pytest.mark.parametrize("goal", ["serve", "generate"])
def test_hardware_that_vllm_refuses_answers_with_llama_cpp(plan, goal, device):
    assert asked(on_catalog(plan, device=device), goal).engine == "llama_cpp"


@pytest.mark.parametrize("goal", ["serve", "generate"])
def test_a_host_answers_with_what_runs_there(plan, goal):
    assert asked(plan, goal).engine is None


def test_a_host_is_asked_about_as_it_was_measured(plan, host):
    device = asked(plan, "serve").cluster.device

    assert host.name in device.source
    assert device.memory_bandwidth_bytes_per_second == 12e9


def test_another_teams_host_is_refused_like_one_that_is_gone(plan, host, other_team):
    Host.objects.filter(pk=host.pk).update(team=other_team)
    foreign = refusal(plan)
    Host.objects.filter(pk=host.pk).delete()

    assert refusal(plan) == foreign
    assert foreign.field == "choice"
    assert "Choose another" in str(foreign)


def test_a_host_that_was_not_measured_yet_is_worth_asking_again(plan, host):
    Host.objects.filter(pk=host.pk).update(microbench={})

    problem = refusal(plan)

    assert (problem.field, problem.is_passing) == ("choice", True)


# Models


def test_a_catalog_model_is_asked_by_its_name(plan):
    plan.draft["model"] = {"source": "catalog", "catalog_id": "openai-community/gpt2"}

    assert asked(plan, "serve").model == "openai-community/gpt2"


@pytest.mark.parametrize(("source", "key"), [("config", "config"), ("folder", "folder_config")])
def test_a_pasted_config_is_asked_as_it_was_pasted(plan, source, key):
    config = {**demo_config(), "vocab_size": 1234}
    plan.draft["model"] = {"source": source, key: config, "path": "here"}

    assert asked(plan, "serve").model == config


def test_another_teams_model_is_refused_like_one_that_is_gone(plan, other_team):
    model = TeamModel.objects.create(team=other_team, name="theirs", config=demo_config())
    plan.draft["model"] = {"source": "team", "team_model": model.pk}
    foreign = refusal(plan)
    model.delete()

    assert refusal(plan) == foreign
    assert (foreign.field, draft_shape(plan)) == ("model", None)


def test_the_shape_of_a_draft_is_that_of_its_model(plan):
    shape = draft_shape(plan)

    assert shape.num_hidden_layers == demo_config()["num_hidden_layers"]
    assert shape.vocab_size == demo_config()["vocab_size"]


def test_a_catalog_model_that_is_gone_has_no_shape(plan):
    plan.draft["model"] = {"source": "catalog", "catalog_id": "nobody/nothing"}

    assert draft_shape(plan) is None


# Values that the planner refuses


@pytest.mark.parametrize(
    ("field", "value"), [("concurrency", 0), ("input_tokens", -5), ("output_tokens", "many")]
)
def test_a_refused_value_is_said_with_its_field(plan, field, value):
    plan.draft["workload"]["serve"][field] = value

    problem = refusal(plan)

    assert problem.field == field
    assert str(problem).startswith(f"{field}: ")
    assert repr(value) in str(problem)


def test_the_page_of_a_refused_draft_says_field_and_value(plan, alice):
    plan.draft["workload"]["serve"]["concurrency"] = 0
    plan.save()

    answer = client_of(alice).get(f"/plans/{plan.pk}/")

    assert answer.status_code == 200
    assert "concurrency: Input should be greater than 0 (it is 0)." in answer.content.decode()
