"""Plans by script: who may read them, exports, limits."""

import json

import pytest
from django.test import Client

from planner.catalog.devices import list_instances
from tests.webapp.conftest import client_of
from webapp.accounts.models import Membership, StoredReply
from webapp.accounts.tokens import token_make
from webapp.jobs.models import Job
from webapp.modelhub.models import TeamModel, demo_config
from webapp.plans.models import Plan
from webapp.plans.planning import current_answer
from webapp.wizard.drafts import demo_document, serve_document, stored_draft

# What scripts ask about a plan: exports and limits.


pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def served(team, alice, host) -> Plan:
    draft = stored_draft(serve_document(host))
    draft["model"] = {"source": "demo", "catalog_id": "meta-llama/Llama-3.1-8B"}
    draft["workload"]["concurrency"] = 1  # within its targets at p95 on one device
    return Plan.objects.create(team=team, owner=alice, name="serve", draft=draft)


@pytest.fixture
def second_version(alice, served) -> Plan:
    """The next version of ``served``, which becomes the first."""
    for name in ("series", "state", "version", "revision"):
        setattr(served, name, {"series": served.pk, "state": "computed"}.get(name, 1))
    served.save()
    return Plan.objects.create(
        team=served.team, owner=alice, name="serve", draft=served.draft, series=served.pk,
        state="computed", version=2, base=served,
    )  # fmt: skip


def get(user, plan, path: str):
    return client_of(user).get(f"/api/v1/plans/{plan.pk}/{path}")


def test_the_formats_of_a_plan_are_those_of_its_answer_with_notes_and_measure(alice, served):
    found = get(alice, served, "exports").json()
    assert found["plan"] == served.pk
    assert [one["key"] for one in found["formats"]] == list(
        current_answer(served).plans[0].exports
    )
    found = get(alice, served, "exports/llama_cpp").json()
    assert "llama-server" in found["text"]
    assert any("convert_hf_to_gguf.py" in note for note in found["notes"])
    assert "CLAIM" in found["measure"]
    answer = get(alice, served, "exports/deepspeed")
    assert answer.status_code == 404
    assert "choose among" in answer.json()["detail"]


def test_a_limit_is_a_number_with_what_lies_beyond(alice, served):
    found = get(alice, served, "limits/longest_context").json()
    assert found["limits"][0]["unit"] == "tokens"
    assert found["limits"][0]["beyond"]["value"] > found["limits"][0]["value"]
    answer = get(alice, served, "limits/longest_sequence")
    assert answer.status_code == 422
    assert "is a question about train" in answer.json()["detail"]


def test_a_draft_that_cannot_be_planned_says_why(alice, served):
    served.draft["hardware"] |= {"host": None, "device": "a-card-of-yesterday"}
    served.save()
    answer = get(alice, served, "exports")
    assert answer.status_code == 422
    assert "a-card-of-yesterday" in answer.json()["detail"]


def test_another_team_cannot_tell_a_foreign_plan_from_none(charlie, served):
    for path in ["exports", "exports/vllm", "limits/most_users"]:
        assert get(charlie, served, path).status_code == 404, path
    foreign = get(charlie, served, "exports").json()
    none = Plan(pk="01J0000000000000000000NONE")
    assert f"plan_id '{served.pk}'" in foreign["detail"]
    foreign["detail"] = foreign["detail"].replace(served.pk, none.pk)
    served.delete()
    assert get(charlie, none, "exports").json() == foreign


# What a script is told of a plan, for every kind of person and for input that is not right.


PROBLEM = "application/problem+json"
PATHS = ("exports", "exports/vllm", "limits/longest_context")
QUESTIONS = {
    "longest_context", "largest_batch", "most_users", "longest_sequence", "largest_model",
    "fewest_devices", "cheapest_instance",
}  # fmt: skip


@pytest.fixture
def training(team, alice, host) -> Plan:
    return Plan.objects.create(
        team=team, owner=alice, name="train", draft=stored_draft(demo_document(host))
    )


def first_limit(user, plan, question: str) -> dict:
    return get(user, plan, f"limits/{question}").json()["limits"][0]


# Versions are deleted together and only on request


def test_one_version_of_several_is_deleted_only_with_all_and_is_then_nowhere(
    alice, served, second_version, job
):
    plans = (served, second_version)
    job.plan = served  # so that its row stays, hidden
    job.save()
    client, first = client_of(alice), f"/api/v1/plans/{served.pk}"
    answer = client.delete(first)
    assert (answer.status_code, answer.json()["code"]) == (409, "has_versions")
    assert "version 1 of 2 (1, 2)" in answer.json()["detail"]
    assert [get(alice, plan, "versions").status_code for plan in plans] == [200, 200]
    assert client.delete(f"{first}?all_versions=true").status_code == 204
    assert Plan.objects.get(pk=served.pk).deleted_at is not None
    for path in ("", "/versions", "/exports", "/exports/vllm", "/limits/most_users"):
        assert client.get(f"{first}{path}").status_code == 404, path
    for path in ("/compute", "/clone", "/launch", "/launch-requests", "/suggestions/0", "/save"):
        answer = client.post(f"{first}{path}", "{}", content_type="application/json")
        assert answer.status_code == 404, path


def test_a_body_that_is_said_not_to_be_json_is_refused_with_the_type_to_send(alice):
    client, body = client_of(alice), '{"text": "vllm serve gpt2"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/yaml"):
        answer = client.post("/api/v1/plans/import", body, content_type=kind)
        assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")
        assert f"is {kind}; " in answer.json()["detail"]
        assert "Content-Type: application/json" in answer.json()["detail"]
    assert not Plan.objects.exists()
    answer = client.post("/api/v1/plans/import", body, content_type="application/json")
    assert answer.status_code == 201


# Who may ask


def test_people_of_the_team_read_everything_and_others_are_told_how_to_come_in(
    vera, bob, served, client, credential, alice
):
    for path in PATHS:
        answers = [get(user, served, path).status_code for user in (vera, bob)]
        assert answers == [200, 200], path
    for path in PATHS:
        answer = client.get(f"/api/v1/plans/{served.pk}/{path}")
        assert (answer.status_code, answer["Content-Type"]) == (401, PROBLEM), path
        assert "log in" in answer.json()["detail"], path
    with_credential = Client(headers={"Authorization": f"Bearer {credential}"})
    answer = with_credential.get(f"/api/v1/plans/{served.pk}/exports")
    assert (answer.status_code, answer.json()["code"]) == (401, "not_authenticated")
    for method in ["post", "put", "delete", "patch"]:
        answer = getattr(client_of(alice), method)(f"/api/v1/plans/{served.pk}/exports")
        assert (answer.status_code, answer["Content-Type"]) == (405, PROBLEM), method
        assert answer["Allow"] == "GET", method
        assert answer.json()["detail"].endswith("it has GET."), method
        assert Plan.objects.filter(pk=served.pk).exists(), method


def test_joining_the_team_opens_its_plans(charlie, team, served):
    before = get(charlie, served, "exports").status_code
    Membership.objects.create(user=charlie, team=team, role="viewer")
    assert (before, get(charlie, served, "exports").status_code) == (404, 200)


# Exports


def test_a_fresh_draft_is_planned_once_and_every_listed_format_is_given(alice, served):
    assert not served.answer
    get(alice, served, "exports")
    served.refresh_from_db()
    assert served.answer["plans"]
    assert served.computed_at is not None
    get(alice, served, "exports")
    first = Plan.objects.get(pk=served.pk).computed_at
    get(alice, served, "exports/vllm")
    assert Plan.objects.get(pk=served.pk).computed_at == first
    for listed in get(alice, served, "exports").json()["formats"]:
        single = get(alice, served, f"exports/{listed['key']}").json()
        assert listed.items() <= single.items()
        assert single["text"].strip()
    for key in ["VLLM", "measure", "a%20b", "%3Cscript%3E", "vllm.sh"]:
        answer = get(alice, served, f"exports/{key}")
        assert (answer.status_code, answer["Content-Type"]) == (404, PROBLEM), key
        assert answer.json()["code"] == "no_export", key
        assert "choose among" in answer.json()["detail"], key
        assert "llama_cpp" in answer.json()["detail"], key


def test_a_script_and_the_page_get_the_same_file_with_python_that_measures(alice, training):
    by_script = get(alice, training, "exports/torchrun").json()
    page = client_of(alice).get(f"/plans/{training.pk}/exports/torchrun/")
    assert page.content.decode() == by_script["text"]
    assert by_script["file_name"] in page["Content-Disposition"]
    measure = get(alice, training, "exports/accelerate").json()["measure"]
    compile(measure, "measure.py", "exec")
    for question in ["most_users", "longest_context"]:
        answer = get(alice, training, f"limits/{question}")
        assert (answer.status_code, answer.json()["code"]) == (422, "limit"), question
        assert "about serve" in answer.json()["detail"], question
        assert answer.json()["detail"].endswith("workload.kind is train."), question


def test_a_training_plan_lists_no_server_and_a_serving_plan_no_trainer(alice, served, training):
    serving, trains = (
        {one["key"] for one in get(alice, plan, "exports").json()["formats"]}
        for plan in (served, training)
    )
    assert "vllm" in serving - trains
    assert "torchrun" in trains - serving


def test_where_nothing_fits_no_format_is_listed_and_each_says_why(alice, served):
    current_answer(served)
    served.answer["plans"] = []
    served.save()
    assert get(alice, served, "exports").json()["formats"] == []
    detail = get(alice, served, "exports/vllm").json()["detail"]
    assert detail == "No plan fits this request, so there is nothing to export."


def test_a_plan_keeps_its_exports_when_its_host_is_gone_and_no_limits(alice, served, host):
    listed = get(alice, served, "exports").json()
    host.delete()
    assert get(alice, served, "exports").json() == listed
    assert get(alice, served, "exports/vllm").status_code == 200
    answer = get(alice, served, "limits/most_users")
    assert answer.status_code == 422
    assert answer.json()["detail"] == ("This host is no longer part of your team. Choose another.")


def test_a_draft_whose_model_is_gone_is_refused_with_the_way_out(alice, team, served):
    model = TeamModel.objects.create(team=team, name="mine", config=demo_config())
    served.draft["model"] |= {"source": "team", "team_model": model.pk}
    served.save()
    model.delete()
    answer = get(alice, served, "exports")
    assert (answer.status_code, answer.json()["code"]) == (422, "draft")
    assert answer.json()["detail"].endswith("Choose another.")


# Limits


def test_the_longest_context_of_a_small_model_is_what_it_can_read(alice, served):
    short = {**demo_config(), "max_position_embeddings": 192}
    served.draft["model"] = {"source": "config", "config": short}
    served.save()
    limit = first_limit(alice, served, "longest_context")
    assert (limit["value"], limit["unit"]) == (192, "tokens")
    assert limit["beyond"]["value"] > 192
    assert "192" in limit["beyond"]["reason"]


def test_a_training_plan_has_its_longest_sequence_and_cheapest_offer(alice, training):
    limit = first_limit(alice, training, "longest_sequence")
    assert limit["value"] == demo_config()["max_position_embeddings"]
    offers = [one for one in list_instances() if one.device and not one.is_spot]
    cheapest = min(one.price_usd_per_hour for one in offers)
    limit = first_limit(alice, training, "cheapest_instance")
    assert (limit["value"], limit["unit"]) == (cheapest, "USD per hour")
    assert limit["name"] in {one.id for one in offers if one.price_usd_per_hour == cheapest}


def test_the_most_users_and_fewest_devices_are_the_last_that_fit(alice, served):
    current_answer(served)
    before = Plan.objects.values().get(pk=served.pk)
    get(alice, served, "limits/most_users")
    assert Plan.objects.values().get(pk=served.pk) == before
    limit = first_limit(alice, served, "most_users")
    beyond = limit["beyond"]
    assert beyond["value"] == limit["value"] + 1
    assert beyond["required"] > beyond["limit"]
    assert limit["estimate"]["fits"] is True
    limit = first_limit(alice, served, "fewest_devices")
    assert (limit["value"], limit["unit"]) == (1, "devices")
    for question in ["Most_users", "most-users", "%3Cb%3E", "0", "meaning_of_life"]:
        answer = get(alice, served, f"limits/{question}")
        assert (answer.status_code, answer["Content-Type"]) == (422, PROBLEM), question
        assert answer.json()["errors"][0]["field"] == "path.question", question
        assert all(f"'{one}'" in answer.json()["detail"] for one in QUESTIONS), question


def test_a_stricter_wish_for_speed_leaves_room_for_no_more_users(alice, served):
    found = []
    for wish in ("none", "chat", "code"):  # no bound, 50 ms and 30 ms for each token
        served.draft["latency_target"] = wish
        served.save()
        found.append(first_limit(alice, served, "most_users")["value"])
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


# Documents that are planned only, or launched in one request


DEMO = {"goal": "pretrain", "model": "demo", "workload": {"time_budget_seconds": 60}}
NIGHT = {"name": "night run", "max_duration_seconds": 1800}


def post(client: Client, path: str, body: dict, **headers: str):
    return client.post(f"/api/v1{path}", body, content_type="application/json", headers=headers)


def test_a_document_is_planned_without_being_kept_as_it_would_be_kept(alice, host):
    client = client_of(alice)
    document = {**DEMO, "hardware": {"host": host.slug}}
    shown = post(client, "/plans?keep=false", document)
    assert (shown.status_code, Plan.objects.exists()) == (200, False)
    kept = post(client, "/plans", document)
    of_rows = {"id", "url", "saved_at", "state", "version", "series", "revision"}
    (before, after) = (
        {name: value for name, value in each.json().items() if name not in of_rows}
        for each in (shown, kept)
    )
    for each in (before, after):
        each["answer"].pop("searched")
    assert before == after
    assert [shown.json()[name] for name in ("id", "url", "version")] == ["", "", None]
    refused = post(client, "/plans?keep=false", {**DEMO, "hardware": {"device": "h100-sxm"}})
    assert (refused.json()["launch"]["can"], Plan.objects.count()) == (False, 1)


def test_a_document_is_launched_with_its_plan_once_or_not_at_all(alice, team, host):
    document = {**DEMO, "hardware": {"host": host.slug}, "launch": NIGHT}
    client = client_of(alice)
    poor = token_make(team=team, by=alice, name="a", scope="launch", budget_gpu_hours=0.1)[1]
    for caller, change, status, code in (
        (client, {"launch": {**NIGHT, "adapter": "x"}}, 422, "adapter"),
        (client, {"hardware": {"device": "h100-sxm"}}, 409, "cannot_launch"),
        (client, {"model": "nobody/nothing"}, 422, "invalid"),
        (Client(headers={"Authorization": f"Bearer {poor}"}), {}, 409, "over_budget"),
    ):
        answer = post(caller, "/jobs", {**document, **change})
        assert (answer.status_code, answer.json()["code"]) == (status, code)
        assert not Plan.objects.exists(), code
        answer = post(caller, "/jobs?dry_run=true", {**document, **change})
        assert (answer.status_code, answer.json()["code"]) == (status, code)
    tried = post(client, "/jobs?dry_run=true", document)
    assert (tried.status_code, tried.json()["job"]["id"]) == (200, "")
    assert (Plan.objects.exists(), Job.objects.exists()) == (False, False)
    first, again = (
        post(client, "/jobs", document, **{"Idempotency-Key": "night"}) for _ in range(2)
    )
    assert (first.status_code, again.content) == (201, first.content)
    StoredReply.objects.all().delete()  # as if its reply had been lost
    lost = post(client, "/jobs", document, **{"Idempotency-Key": "night"}).json()
    job = Job.objects.get()
    assert (lost["job"]["id"], job.name, job.max_duration_seconds) == (job.pk, "night run", 1800)
    assert job.plan == Plan.objects.get()
    tried = post(client, f"/plans/{job.plan_id}/launch?dry_run=true", NIGHT)
    assert (tried.status_code, tried.json()["job"]["name"]) == (200, "night run")
    assert Job.objects.get() == job


def test_a_launch_with_the_names_of_older_commands_is_the_same(alice, host):
    old = {"hours": 0.5, "retries": 2, "priority": "low"}
    client = client_of(alice)
    document = {**DEMO, "hardware": {"host": host.slug}, "launch": old}
    assert post(client, "/jobs", document).status_code == 201
    job = Job.objects.get()
    assert (job.max_duration_seconds, job.max_retries, job.priority) == (1800, 2, -1)
    asked = post(client, f"/plans/{job.plan_id}/launch-requests", {"launch": old})
    new = {"max_duration_seconds": 1800, "max_retries": 2, "priority": "low"}
    assert asked.json()["launch"] == new


def test_null_in_a_merge_patch_empties_a_field(alice, host):
    client = client_of(alice)
    hardware = {"host": host.slug, "memory_limit_gib": 4}
    made = post(client, "/plans", {**DEMO, "hardware": hardware}).json()
    patch = {"workload": {"time_budget_seconds": None, "tokens": 500_000}}
    patch |= {"hardware": {"memory_limit_gib": None, "no_field": None}}
    path = f"/api/v1/plans/{made['id']}"
    changed = client.patch(path, json.dumps(patch), "application/json").json()["document"]
    assert changed["hardware"]["host"] == made["document"]["hardware"]["host"]
    assert "memory_limit_gib" not in changed["hardware"]
    assert changed["workload"]["tokens"] == 500_000
    assert changed["workload"].get("time_budget_seconds") is None


def test_a_merge_patch_that_names_a_training_text_changes_its_source(alice, host):
    client = client_of(alice)
    made = post(client, "/plans", {**DEMO, "hardware": {"host": host.slug}}).json()
    for workload, source in (
        ({"data_repository": "tiny/chats"}, "hub"),
        ({"data_path": "a.jsonl"}, "file"),
        ({"data_repository": "tiny/other", "data_source": "file"}, "file"),
    ):
        path, patch = f"/api/v1/plans/{made['id']}", json.dumps({"workload": workload})
        made = client.patch(path, patch, "application/json").json()
        assert made["document"]["workload"]["data_source"] == source, workload


def test_the_launch_of_a_document_is_asked_for_and_its_faults_are_named(alice, host):
    client = client_of(alice)
    document = {**DEMO, "hardware": {"host": host.slug}, "launch": NIGHT}
    wrong = {**document, "workload": {"time_budget_seconds": -1}}
    answer = post(client, "/launch-requests", {"document": wrong, "reason": "x"})
    assert answer.json()["errors"][0]["field"] == "body.document.workload.time_budget_seconds"
    assert not Plan.objects.exists()
    asked = post(client, "/launch-requests", {"document": document, "reason": "for the paper"})
    assert asked.status_code == 201
    assert (asked.json()["launch"], asked.json()["reason"]) == (NIGHT, "for the paper")
    assert Plan.objects.get().pk == asked.json()["plan"]


# What the schema says


def test_the_schema_names_the_refusals_of_each_question(alice):
    schema = client_of(alice).get("/api/v1/openapi.json").json()
    for path in ("exports", "exports/{key}", "limits/{question}"):
        replies = schema["paths"][f"/api/v1/plans/{{plan_id}}/{path}"]["get"]["responses"]
        assert {"200", "401", "404", "422"} <= set(replies), path
