"""Plans as documents: the same draft, question and job as by clicks, and back again."""

import json

import pytest
import yaml
from pydantic import ValidationError

from runners.plans.document import GOALS, PLANS
from runners.plans.workloads import WORKLOADS
from tests.webapp.conftest import client_of
from webapp.core.problems import InvalidProblem
from webapp.jobs.models import Job
from webapp.modelhub.models import TeamModel, demo_config
from webapp.plans.models import Plan
from webapp.plans.places import question_of
from webapp.wizard.documents import (
    adapter,
    document_of,
    document_of_request,
    draft_fill,
)
from webapp.wizard.drafts import serve_document, stored_draft
from webapp.wizard.workload_forms import workload_form

pytestmark = pytest.mark.django_db(databases="__all__")


def filled(team, alice, document: dict) -> Plan:
    plan = Plan(team=team, owner=alice, draft=stored_draft(serve_document(None)))
    draft_fill(plan, adapter().validate_python(document))
    return plan


def post(client, path: str, body: dict):
    return client.post(f"/api/v1{path}", json.dumps(body), "application/json")


def test_a_document_has_every_field_of_the_forms_and_its_limits():
    for goal, document in PLANS.items():
        fields = document.model_fields["workload"].annotation.model_fields
        form = workload_form(goal)
        own = {name for name in form.fields if not name.startswith("mix_")}
        mixed = {"mixture"} if "mix_source_1" in form.fields else set()
        assert set(fields) == own | mixed, goal
        assert all(each.description for each in fields.values()), goal
    schema = adapter().json_schema()
    tokens = schema["$defs"]["ServeWork"]["properties"]["input_tokens"]
    assert (tokens["minimum"], tokens["maximum"]) == (1, 1_000_000)
    assert schema["discriminator"]["propertyName"] == "goal"


@pytest.mark.parametrize("goal", GOALS)
def test_an_empty_document_is_the_wizards_default_and_comes_back_as_it_went(team, alice, goal):
    plan = filled(team, alice, {"goal": goal, "model": "demo"})
    expected = stored_draft(serve_document(None))
    chosen = plan.draft["workload"]
    usual = WORKLOADS[goal]().model_dump(mode="json")
    same = {name for name, value in usual.items() if chosen.get(name) == value}
    assert len(same) >= len(usual) - 3  # what the small model cannot read is shorter
    assert plan.draft["hardware"] == expected["hardware"]
    document = document_of(plan)
    again = filled(team, alice, yaml.safe_load(yaml.safe_dump(document)))
    assert document_of(again) == document
    assert question_of(again).request == question_of(plan).request


def test_each_part_of_a_document_reaches_the_draft(team, alice, host):
    model = TeamModel.objects.create(team=team, name="Own", source="config", config=demo_config())
    plan = filled(
        team,
        alice,
        {
            "goal": "finetune",
            "objective": "cost",
            "model": {"team_model": "Own"},
            "workload": {
                "method": "qlora",
                "sequence_length": 64,
                "tokens": None,
                "time_budget_seconds": 180,
                "data_source": "mixed",
                "mixture": [{"source": "host"}, {"source": "file", "path": "a.txt", "weight": 2}],
            },
            "hardware": {"host": host.slug, "memory_limit_gib": 7.5},
            "pins": {"micro_batch_size": 2},
        },
    )
    draft = plan.draft
    assert draft["objective"] == "cost"
    assert (draft["model"]["source"], draft["model"]["team_model"]) == ("team", model.pk)
    values = draft["workload"]
    assert (values["method"], values["tokens"], values["time_budget_seconds"]) == (
        "qlora", None, 180.0,
    )  # fmt: skip
    first, second = values["mixture"]
    assert (first["source"], first["weight"]) == ("host", 1.0)
    assert (second["path"], second["weight"]) == ("a.txt", 2.0)
    assert (draft["hardware"]["host"], draft["hardware"]["memory_limit_gib"]) == (host.pk, 7.5)
    assert draft["pins"]["micro_batch_size"] == 2
    document = document_of(plan)
    assert document["hardware"]["host"] == host.slug
    assert [row["source"] for row in document["workload"]["mixture"]] == ["host", "file"]


OLD_AND_NEW = [
    (
        {
            "goal": "serve",
            "workload": {"prefix_share_percent": 25},
            "pins": {"prefill_devices": 1, "decode_devices": 3},
            "launch": {
                "run": "endpoint", "hours": 2, "retries": 1, "idle_minutes": 30,
                "prefix_cache": True, "draft": "lookup",
            },
        },
        {
            "goal": "serve",
            "workload": {"prefix_share_ratio": 0.25},
            "pins": {"disaggregated": {"prefill_devices": 1, "decode_devices": 3}},
            "launch": {
                "run": "endpoint", "max_duration_seconds": 7200, "max_retries": 1,
                "idle_stop_seconds": 1800, "prefix_caching": True, "draft_model": "lookup",
            },
        },
    ),
    (
        {"goal": "generate", "workload": {"guessing": "lookup", "decode_step": "compiled"}},
        {"goal": "generate", "workload": {"speculation": "lookup", "compiled_step": True}},
    ),
    (
        {
            "goal": "pretrain",
            "workload": {
                "time_budget_minutes": 1.5, "million_tokens": 0.5, "lengths": "grow",
                "rounding": "4", "products": "fp8", "training_step": "compiled",
                "early_stop": "2", "exported_weights": "last", "text_samples": "100",
                "data_source": "mixed", "mix_weights": "dynamic", "mix_every": 7,
                "mixture": [
                    {"source": "host", "reference": 2.5}, {"source": "file", "path": "a.txt"},
                ],
            },
        },
        {
            "goal": "pretrain",
            "workload": {
                "time_budget_seconds": 90, "tokens": 500_000, "length_schedule": "grow",
                "qat_bits": 4, "compute_dtype": "fp8", "compiled": True,
                "early_stop_validations": 2, "keep_best": False, "text_samples_every_steps": 100,
                "data_source": "mixed", "mixture_weights": "dynamic",
                "mixture_update_every_steps": 7,
                "mixture": [
                    {"source": "host", "reference_loss": 2.5}, {"source": "file", "path": "a.txt"},
                ],
            },
        },
    ),
]  # fmt: skip


def test_a_training_without_a_batch_has_that_of_its_hardware_and_a_stated_one_stays(team, alice):
    model = "meta-llama/Llama-3.1-405B"
    hardware = {"device": "h100-sxm5-80gb", "devices_per_node": 8, "nodes": 128}
    for goal, workload, sizes in [
        ("pretrain", {}, (8192, 2048)),
        ("pretrain", {"global_batch_size": 16}, (8192, 16)),
        ("finetune", {}, (2048, 128)),
    ]:
        document = {"goal": goal, "model": model, "hardware": hardware, "workload": workload}
        work = filled(team, alice, document).document.workload
        assert (work.sequence_length, work.global_batch_size) == sizes, (goal, workload)


@pytest.mark.parametrize(("old", "new"), OLD_AND_NEW, ids=["serve", "generate", "pretrain"])
def test_a_document_with_the_names_of_before_the_first_release_is_the_same(team, alice, old, new):
    assert filled(team, alice, old).draft == filled(team, alice, new).draft


def test_a_device_is_named_as_people_write_it_with_counts_that_agree(team, alice):
    for hardware, expected in (
        ({"device": "2x8xh200"}, ("h200-sxm-141gb", 8, 2)),
        ({"device": "rtx4090"}, ("rtx-4090", 1, 1)),
        ({"device": "m2 8gb"}, ("apple-m2-10gpu-8gb", 1, 1)),
        ({"device": "A100-80GB:4", "nodes": 1}, ("a100-sxm4-80gb", 4, 1)),
    ):
        plan = filled(team, alice, {"goal": "serve", "model": "demo", "hardware": hardware})
        chosen = plan.draft["hardware"]
        found = (chosen["device"], chosen["devices_per_node"], chosen["nodes"])
        assert found == expected, hardware
    for hardware, words in (
        ({"device": "8xh200", "devices_per_node": 4}, "Give one of them"),
        ({"device": "aws/p5.48xlarge"}, "a cloud offer"),
        ({"device": "m2 12gb"}, "apple-m2-10gpu-8gb"),
    ):
        with pytest.raises(InvalidProblem, match=words):
            filled(team, alice, {"goal": "serve", "model": "demo", "hardware": hardware})


def test_a_models_name_is_its_id_and_a_type_in_it_that_is_not_pinned_is_said(team, alice):
    for name, model, words in (
        ("hf.co/unsloth/Qwen3-8B-GGUF:Q5_K_M", "Qwen/Qwen3-8B", "gguf:q5_k_m"),
        ("https://huggingface.co/Qwen/Qwen3-8B", "Qwen/Qwen3-8B", ""),
    ):
        plan = Plan(team=team, owner=alice, draft=stored_draft(serve_document(None)))
        notes = draft_fill(plan, adapter().validate_python({"goal": "serve", "model": name}))
        assert plan.draft["model"]["catalog_id"] == model, name
        assert words in " ".join(notes), name


def test_a_name_of_several_models_is_refused_with_their_ids(team, alice, host):
    ids = {
        TeamModel.objects.create(team=team, name="Own", source="config", config=demo_config()).pk
        for _ in range(2)
    }
    for model in ("Own", {"team_model": "Own"}):
        with pytest.raises(
            InvalidProblem, match="2 models of your team have this name"
        ) as refused:
            filled(team, alice, {"goal": "serve", "model": model})
        assert all(each in refused.value.detail for each in ids)
    plan = filled(team, alice, {"goal": "serve", "model": min(ids)})
    assert plan.draft["model"]["team_model"] == min(ids)


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"workload": {"input_tokens": 0}}, "body.input_tokens", "greater than or equal to 1"),
        ({"workload": {"input_token": 5}}, "body.input_token", "nearest is “input_tokens”"),
        ({"hardwear": {}}, "body.hardwear", "nearest is “hardware”"),
        ({"zzz": 1}, "body.zzz", "there are goal, name, objective, "),
        ({"model": {"team_modle": "x"}}, "body.team_modle", "nearest is “team_model”"),
        ({"goal": "serving"}, "body.goal", "'serving'; it can be compress, finetune, generate"),
        ({"goal": None}, "body.goal", "it can be compress, finetune, generate, pretrain, serve"),
        ({"model": "no such model"}, "model", "can be given as its config"),
        ({"model": {}}, None, "names nothing"),
        ({"model": {"team_model": "theirs"}}, None, "your team's models are"),
        ({"hardware": {"host": "no-host"}}, None, "There are: "),
        ({"hardware": {"device": "h2000"}}, None, "nearest"),
        ({"hardware": {"device": "h200", "host": "box"}}, None, "one of host, pool and device"),
        ({"hardware": {"device": "h200", "engine": "tgi"}}, "hardware.engine", "tgi"),
        ({"hardware": {"host": "box", "nodes_per_pod": 4}}, "hardware.nodes_per_pod", "catalog"),
        ({"hardware": {"topology": "nvl72000"}}, "hardware.topology", "it has gb200-nvl72"),
        ({"pins": {"disaggregated": {"prefill_devices": 1}}}, "body.decode_devices", "required"),
        ({"pins": {"prefill_devices": 1}}, "body.decode_devices", "required"),  # its old name
        ({"goal": "compress", "workload": {"method": "awq", "bits": 5}}, "body.bits", "2, 3, 4"),
        (
            {
                "goal": "generate",
                "pins": {"disaggregated": {"prefill_devices": 1, "decode_devices": 1}},
            },
            "pins.disaggregated",
            "not apply",
        ),
    ],
)
def test_what_a_document_gets_wrong_is_named_by_field(alice, host, changes, field, words):
    answer = post(client_of(alice), "/plans", {"goal": "serve", "model": "demo"} | changes)
    found = answer.json()
    assert (answer.status_code, words in found["detail"]) == (422, True), found
    if field:
        assert field.rpartition(".")[2] in found["errors"][0]["field"], found
    assert not Plan.objects.exists()


def test_a_pool_of_one_host_is_that_host(team, alice, host):
    for name in (host.pool.name, host.pool_id):
        plan = filled(team, alice, {"goal": "pretrain", "hardware": {"pool": name}})
        hardware = plan.draft["hardware"]
        assert (hardware["host"], hardware["pool"]) == (host.pk, None)


def test_a_topology_is_of_a_catalog_device_and_leaves_with_it(team, alice, host):
    def fill(hardware):
        draft_fill(plan, adapter().validate_python({"goal": "pretrain", "hardware": hardware}))
        return plan.document.hardware

    joined = {"topology": "gb200-nvl72"}
    for place in ({"host": host.slug}, {"pool": host.pool.name}):
        plan = filled(team, alice, {"goal": "pretrain", "hardware": place})
        with pytest.raises(InvalidProblem, match="give a device in place of a host or pool"):
            fill(joined)
        assert fill({"device": "gb200-nvl72", **joined}).topology == "gb200-nvl72"
        assert fill({"nodes_per_pod": 2}).nodes_per_pod == 2
        hardware = fill(place)
        assert (hardware.host, hardware.topology, hardware.nodes_per_pod) == (host.pk, None, None)


def test_a_misspelt_field_of_a_change_or_a_launch_is_named_with_the_nearest(alice, host):
    client = client_of(alice)
    plan = f"/plans/{post(client, '/plans', {'goal': 'serve', 'model': 'demo'}).json()['id']}"
    patch = client.patch(f"/api/v1{plan}", '{"hardwear": {}}', content_type="application/json")
    for answer, field, near in (
        (patch, "hardwear", "“hardware”"),
        (post(client, f"{plan}/launch", {"max_retires": 1}), "body.max_retires", "“max_retries”"),
    ):
        assert answer.status_code == 422, answer.content
        fault = answer.json()["errors"][0]
        assert (fault["field"], near in fault["message"]) == (field, True), fault


def test_a_launch_by_document_is_the_launch_by_clicks(alice, team, host):
    browser = client_of(alice)
    body = {
        "goal": "pretrain",
        "model": "demo",
        "hardware": {"host": host.slug},
        "workload": {"time_budget_seconds": 90, "sequence_length": 128, "optimizer": "lion"},
    }
    plan = post(browser, "/plans", body).json()
    by_script = post(
        browser, f"/plans/{plan['id']}/launch", {"max_duration_seconds": 7200, "priority": "low"}
    )
    assert by_script.status_code == 201, by_script.content
    draft = browser.get("/plans/new/?preset=demo")["Location"].split("/")[2]
    shown = {each.name: each.value() for each in workload_form("pretrain")}
    for step, posted in {
        "goal": {"goal": "pretrain", "objective": "balanced", "latency_target": "chat", "percentile": "p95"},
        "model": {"source": "demo"},
        "workload": {
            **{name: value for name, value in shown.items() if value not in (None, "")},
            "time_budget_seconds": 1.5, "sequence_length": 128, "optimizer": "lion",
        },
        "hardware": {
            "choice": f"host:{host.pk}", "device": "rtx-4090", "devices_per_node": 1, "nodes": 1,
        },
    }.items():  # fmt: skip
        answer = browser.post(f"/plans/{draft}/edit/{step}/", posted)
        assert answer.status_code == 302, (step, answer.content)
    browser.post(f"/plans/{draft}/launch/", {"max_duration_seconds": "2", "priority": "low"})
    first, second = Job.objects.order_by("created_at")
    assert json.dumps(first.spec) == json.dumps(second.spec)
    assert (first.max_duration_seconds, first.priority, first.plan_request) == (
        second.max_duration_seconds, second.priority, second.plan_request,
    )  # fmt: skip


def test_a_merge_patch_makes_the_next_version_and_a_refused_one_none(alice, team):
    client = client_of(alice)
    body = {"goal": "serve", "model": "demo", "hardware": {"device": "rtx-4090"}}
    plan = post(client, "/plans", body | {"name": "chat"}).json()
    path = f"/api/v1/plans/{plan['id']}"
    patch = {"workload": {"concurrency": 3}, "pins": {"kv_cache_dtype": "fp8"}}
    changed = client.patch(path, json.dumps(patch), "application/json").json()
    assert (plan["version"], changed["version"], changed["name"]) == (1, 2, "chat")
    assert changed["document"]["workload"]["concurrency"] == 3
    assert changed["document"]["pins"] == {"kv_cache_dtype": "fp8"}
    assert client.get(path).json()["document"]["workload"]["concurrency"] == 16
    old_name = json.dumps({"workload": {"prefix_share_percent": 50}})
    kept = client.patch(f"/api/v1/plans/{changed['id']}", old_name, "application/json").json()
    assert kept["document"]["workload"]["prefix_share_ratio"] == 0.5
    refused = client.patch(path, json.dumps({"workload": {"concurrency": 0}}), "application/json")
    assert refused.status_code == 422
    assert Plan.objects.count() == 3
    versions = client.get(f"{path}/versions").json()["items"]
    assert [each["version"] for each in versions] == [3, 2, 1]
    assert "Concurrent requests: 16 → 3" in versions[1]["changes"]


def test_a_plan_that_the_planner_refuses_stays_a_draft_with_the_reason(alice):
    body = {
        "goal": "serve", "model": "demo", "hardware": {"device": "rtx-4090"},
        "pins": {"tensor_parallel_size": 7},
    }  # fmt: skip
    answer = post(client_of(alice), "/plans", body)
    found = answer.json()
    assert (answer.status_code, found["state"], found["answer"]) == (201, "draft", None), found
    assert found["problem"]
    assert found["launch"]["can"] is False


@pytest.mark.parametrize(
    "model", ["", "../x", "a" * 300, {"path": "..", "config": {}}, {"config": {"a": 1}}]
)
def test_a_model_that_is_none_is_refused(team, alice, model):
    with pytest.raises((InvalidProblem, ValidationError), match=r"."):
        filled(team, alice, {"goal": "serve", "model": model})


@pytest.mark.parametrize("goal", GOALS)
def test_the_planners_own_request_makes_the_same_plan(team, alice, goal):
    body = {"goal": goal, "model": "demo", "hardware": {"device": "h100-sxm"}}
    more = {"workload": {"tokens": 3_000_000}} if goal in {"pretrain", "finetune"} else {}
    plan = filled(team, alice, body | more)
    request = question_of(plan).request.model_dump(mode="json")
    document, notes = document_of_request(request)
    again = filled(team, alice, document)
    assert question_of(again).request == question_of(plan).request
    assert notes == []


def test_what_no_form_has_is_said_and_the_rest_is_kept():
    document, notes = document_of_request(
        {
            "model": "demo",
            "workload": {"kind": "serve", "input_tokens": 9, "request_rate_per_second": 2.0},
            "engine": "vllm 0.12.0",
            "constraints": {"ttft_p95_seconds": {"max": 0.4}},
            "pins": {"tensor_parallel_size": 2, "zero_stage": 1},
            "top": 9,
        },
        host="box",
    )
    assert document == {
        "goal": "serve", "model": "demo", "latency_target": "none",
        "workload": {"input_tokens": 9}, "hardware": {"host": "box", "engine": "vllm"},
        "pins": {"tensor_parallel_size": 2, "zero_stage": 1},
    }  # fmt: skip
    assert [note.split(" = ")[0] for note in notes] == [
        "constraints.ttft_p95_seconds.max", "workload.request_rate_per_second",
    ]  # fmt: skip
    with pytest.raises(InvalidProblem, match="serve, generate, train or"):
        document_of_request({"workload": {"kind": "dance"}})
