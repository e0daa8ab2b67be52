"""Workflows: planned as a whole, advanced by the ends of their jobs, stopped and resumed."""

from html import unescape

import pytest
from django.db import DataError, OperationalError

from runners.jobspec.engines import OWN
from runners.plans.refusals import DraftProblem
from runners.plans.workflow import WorkflowDocument
from tests.webapp.conftest import client_of
from tests.webapp.jobs.test_finish import MEASURED, finish
from webapp.accounts.models import Membership
from webapp.agents.dispatch import allocate_all
from webapp.audit.models import Event
from webapp.core.problems import BusyProblem, ConflictProblem, InvalidProblem, Problem
from webapp.jobs import series
from webapp.jobs.models import Job, JobState
from webapp.jobs.services import job_stop
from webapp.modelhub.models import TeamModel
from webapp.plans.models import Plan
from webapp.plans.repositories import UnreachableError
from webapp.workflows import services
from webapp.workflows.listing import view_of
from webapp.workflows.models import Workflow
from webapp.workflows.planning import workflow_plan
from webapp.workflows.services import (
    advance_all,
    workflow_advance,
    workflow_resume,
    workflow_start,
    workflow_stop,
)

pytestmark = pytest.mark.django_db(databases="__all__")
FAILURE = "The job's program reported a failure."
PRETRAIN = {"goal": "pretrain", "model": "demo"}
CHAIN = [
    PRETRAIN,
    {"goal": "evaluate"},
    {"goal": "compress", "workload": {"method": "awq"}},
    {"goal": "serve", "launch": {"run": "endpoint"}},
]


def started(team, alice, steps=CHAIN, **fields):
    document = WorkflowDocument.model_validate({"steps": steps, **fields})
    return workflow_start(team=team, by=alice, document=document)


def states(workflow: Workflow) -> list[str]:
    return list(workflow.steps.values_list("state", flat=True))


def jobs(workflow: Workflow) -> list[Job]:
    return [each.job for each in workflow.steps.select_related("job") if each.job]


def end(workflow: Workflow, reason: str = "ok", **measured: float) -> Workflow:
    """End the jobs that run, and let the workflow go on."""
    allocate_all()
    for job in jobs(workflow):
        if job.state == JobState.PREFLIGHT:
            finish(job, MEASURED | measured, reason=reason)
    workflow_advance(workflow)
    workflow.refresh_from_db()
    return workflow


def test_each_step_starts_from_the_model_that_the_last_one_made(team, alice, host):
    workflow, key = started(team, alice)
    assert key is not None
    assert states(workflow) == ["running", "waiting", "waiting", "waiting"]
    end(workflow)
    trained = TeamModel.objects.get()
    assert jobs(workflow)[1].spec["model"]["attempt_id"] == trained.attempt_id
    end(workflow)
    end(workflow)
    train, evaluate, compress, serve = jobs(workflow)
    assert [each.kind for each in jobs(workflow)] == ["train", "evaluate", "compress", "serve"]
    assert compress.spec["model"]["attempt_id"] == train.current_attempt_id
    assert serve.spec["model"]["attempt_id"] == compress.current_attempt_id
    assert len(serve.spec["key_hashes"]) == 2
    assert serve.spec["weight_dtype"] == "int4"
    assert {each.host or each.requested_host for each in jobs(workflow)} == {host}
    assert states(workflow) == ["succeeded"] * 3 + ["running"]
    job_stop(job=serve, by="alice")
    assert evaluate.plan is None
    assert compress.plan.document.model.team_model == trained.pk


def test_a_workflow_is_planned_as_a_whole_before_anything_starts(team, alice, host):
    workflow, _ = started(team, alice)
    forecast = [sorted(each.forecast) for each in workflow.steps.all()]
    both = ["disk_bytes", "duration_seconds"]
    assert forecast == [both, ["duration_seconds"], both, []]
    Workflow.objects.all().delete()
    Job.objects.all().delete()
    Plan.objects.all().delete()
    cases = {
        "steps.1.tensor_parallel_size": [
            PRETRAIN,
            {"goal": "generate", "pins": {"tensor_parallel_size": 64}},
        ],
        "steps.2.launch.engine": [
            PRETRAIN,
            {"goal": "compress", "workload": {"method": "gguf"}},
            {"goal": "serve", "launch": {"run": "endpoint"}},
        ],
        "steps.1.hardware.host": [PRETRAIN, {"goal": "serve", "hardware": {"host": "nowhere"}}],
        "steps.1.launch.profile": [
            PRETRAIN,
            {"goal": "serve", "launch": {"run": "endpoint", "profile": True}},
        ],
    }
    for path, steps in cases.items():
        with pytest.raises(InvalidProblem) as raised:
            started(team, alice, steps)
        named = raised.value.facts["errors"][0]["field"].split(".")
        assert (named[:2], named[-1]) == (path.split(".")[:2], path.split(".")[-1])
    assert not Job.objects.exists()
    assert not Workflow.objects.exists()


def test_a_step_that_fails_ends_the_workflow_and_is_resumed_with_what_was_done(team, alice, host):
    workflow, _ = started(team, alice)
    end(workflow)
    end(workflow, reason="exit_nonzero")
    assert workflow.state == "failed"
    assert states(workflow) == ["succeeded", "failed", "waiting", "waiting"]
    assert [row.problem for row in view_of(workflow).rows] == ["", FAILURE, "", ""]
    page = client_of(alice).get(f"/workflows/{workflow.pk}/").content.decode()
    assert FAILURE in unescape(page)
    trained, failed = jobs(workflow)
    workflow_resume(workflow, alice)
    assert workflow.state == "running"
    assert jobs(workflow)[0] == trained
    assert jobs(workflow)[1] != failed
    end(workflow)
    assert states(workflow) == ["succeeded", "succeeded", "running", "waiting"]
    with pytest.raises(Problem, match="only one that failed"):
        workflow_resume(workflow, alice)


def test_a_job_launched_at_the_moment_of_the_stop_is_stopped_and_one_that_ended_stops_nothing(
    team, alice, host, monkeypatch
):
    workflow, _ = started(team, alice)
    Workflow.objects.filter(pk=workflow.pk).update(state="stopped")
    advance_all()
    assert jobs(workflow)[0].state == "stopped"

    workflow, _ = started(team, alice)

    def ended(**_: object) -> None:
        raise ConflictProblem("ended", "It has ended.")

    monkeypatch.setattr(series, "job_stop", ended)
    workflow_stop(workflow, alice)  # that of its job, which ended meanwhile, stops nothing
    workflow.refresh_from_db()
    assert workflow.state == "stopped"


def test_a_stopped_workflow_starts_nothing_more(team, alice, host):
    workflow, _ = started(team, alice)
    workflow_stop(workflow, alice)
    workflow_advance(Workflow.objects.get())
    advance_all()
    assert jobs(workflow)[0].state == "stopped"
    assert (workflow.state, states(workflow)[0]) == ("stopped", "stopped")
    assert Job.objects.count() == 1
    with pytest.raises(Problem, match="has ended"):
        workflow_stop(workflow, alice)
    workflow_resume(workflow, alice)
    assert states(workflow)[0] == "running"
    assert Job.objects.count() == 2
    kinds = set(Event.objects.filter(subject=workflow.pk).values_list("kind", flat=True))
    assert kinds == {"workflow.started", "workflow.stopped", "workflow.resumed"}


def test_a_job_of_a_sweep_per_value_and_the_best_model_goes_on(team, alice, host):
    sweep = {"workload.learning_rate": [1e-4, 3e-4, 1e-3]}
    workflow, _ = started(team, alice, [{**PRETRAIN, "sweep": sweep}, {"goal": "evaluate"}])
    assert [each.spec["learning_rate"] for each in jobs(workflow)] == sweep[
        "workload.learning_rate"
    ]
    for perplexity in (40.0, 30.0, 50.0):
        end(workflow, perplexity=perplexity)  # the host runs one after the other
    evaluation = jobs(workflow)[3]
    assert evaluation.spec["model"]["attempt_id"] == jobs(workflow)[1].current_attempt_id
    assert workflow.steps.all()[1].title == "Pre-train, learning_rate 0.0003"


def test_one_call_starts_a_step_once_and_an_owner_who_left_starts_none(team, alice, host):
    workflow, _ = started(team, alice)
    Membership.objects.filter(user=alice).delete()
    end(workflow)
    assert states(workflow)[1] == "failed"
    assert "no longer a practitioner" in workflow.steps.get(position=1).problem
    assert workflow.state == "running"
    workflow_advance(workflow)
    assert Workflow.objects.get().state == "failed"
    assert Job.objects.count() == 1


def test_a_sweep_of_methods_is_planned_from_the_model_before_it_and_the_next_from_the_largest(
    team, alice, host
):
    sweep = {"workload.method": ["gptq", "int8_weight_only", "awq"]}
    compress = {"goal": "compress", "workload": {"method": "awq"}, "sweep": sweep}
    steps = [PRETRAIN, compress, {"goal": "generate"}]
    document = WorkflowDocument.model_validate({"steps": steps})
    planned = workflow_plan(team, alice, document)
    sizes = [each.forecast["disk_bytes"]["value"] for each in planned if each.goal == "compress"]
    assert sizes[1] > sizes[0] == sizes[2]
    stored = planned[-1].plan.document.model.config["quantization_config"]
    assert stored["config_groups"]["group_0"]["weights"]["num_bits"] == 8


def test_what_passes_lets_a_step_wait_with_its_reason_and_a_fault_fails_it(
    team, alice, host, monkeypatch
):
    raised = [
        DraftProblem("It is being measured.", "host", is_passing=True),
        BusyProblem("busy", "Later."),
        UnreachableError("The hub is down."),
        OperationalError("locked"),
        DataError("too long for its column"),
    ]
    workflow, _ = started(team, alice)

    def refuse(*_args, **_fields):
        raise raised[0]

    monkeypatch.setattr(services, "draft_of_document", refuse)
    monkeypatch.setattr(services, "evaluation_submit", refuse)
    end(workflow)
    said = []
    while len(raised) > 1:
        said.append((states(workflow)[1], workflow.steps.get(position=1).problem))
        raised.pop(0)
        advance_all()
    words = ["It is being measured.", "Later.", "The hub is down."]
    assert said == [("waiting", each) for each in (*words, words[-1])]
    assert states(workflow)[1] == "failed"
    assert workflow.steps.get(position=1).problem == services.FAULT


def test_who_may_look_stop_resume_and_delete(team, alice, bob, charlie, olga, vera, host):
    workflow, _ = started(team, alice)
    address = f"/api/v1/workflows/{workflow.pk}"
    assert [client_of(each).get(address).status_code for each in (vera, charlie)] == [200, 404]

    def send(user, method, act=""):
        return getattr(client_of(user), method)(f"{address}{act}").status_code

    assert send(alice, "delete") == 409  # it runs
    assert [send(each, "post", "/stop") for each in (vera, bob, charlie, olga)] == [
        *(403, 403, 404, 200)
    ]
    assert send(olga, "post", "/resume") == 200
    workflow.refresh_from_db()
    assert {workflow.owner, jobs(workflow)[0].owner} == {olga}  # who resumes it owns what follows
    assert [send(olga, "post", "/stop"), send(alice, "delete"), send(olga, "delete")] == [
        *(200, 403, 204)
    ]
    assert (Workflow.objects.count(), Job.objects.count()) == (0, 2)


def test_the_api_plans_starts_and_shows(team, alice, host):
    client = client_of(alice)
    body = {"name": "Small", "steps": CHAIN}
    dry = client.post("/api/v1/workflows?dry_run=true", body, "application/json")
    assert (dry.status_code, Workflow.objects.count(), Job.objects.count()) == (200, 0, 0)
    assert dry.json()["workflow"]["forecast"]["disk_bytes"]["value"] > 0
    made = client.post("/api/v1/workflows", body, "application/json").json()
    assert made["endpoint_key"].startswith("sk-slipway-")
    assert client.get("/api/v1/workflows").json()["items"][0]["name"] == "Small"
    wrong = client.post(
        "/api/v1/workflows",
        {"steps": [PRETRAIN, {"goal": "compress", "workload": {"method": "no"}}]},
        "application/json",
    )
    assert wrong.json()["errors"][0]["field"] == "body.steps.1.workload.method"


def test_the_pages_show_what_may_follow_and_start_it(team, alice, vera, host):
    client = client_of(alice)
    plan = client.post("/api/v1/plans", PRETRAIN, "application/json").json()
    page = client.get(f"/plans/{plan['id']}/edit/review/").content.decode()
    assert "And then" in page
    assert "beside the one that it started from" not in page
    asked = {"run": "workflow", "then_evaluate": "on", "then_compress": "awq", "then_serve": OWN}
    address = f"/plans/{plan['id']}/launch/"
    assert client.post(address, {"run": "workflow"}).status_code == 422
    assert client.post(address, asked | {"then_compress": "gguf"}).status_code == 422
    for wrong, field in (
        ({"sweep_job": "workload.nothing = 1, 2"}, "Values to try of this job"),
        ({"sweep_job": "faster"}, "Values to try of this job"),
        ({"compress_group_size": "7"}, "Group size"),
        ({"then_compress": "gguf", "sweep_compress": "workload.bits = 4, 8"}, "Serve it"),
        ({"serve_engine_args": "--a 'b"}, "Further engine arguments"),
    ):
        refused = client.post(address, asked | {"then_evaluate": ""} | wrong)
        assert (refused.status_code, field in refused.content.decode()) == (422, True), wrong
    options = {
        "evaluate_tasks": "held_out_choice", "compress_group_size": "32",
        "compress_sparsity": "30", "sweep_compress": "workload.bits = 4, 8",
        "serve_idle_stop_seconds": "30",
    }  # fmt: skip
    made = client.post(address, asked | options)
    workflow = Workflow.objects.get()
    evaluation, compression, endpoint = workflow.document["steps"][1:]
    assert evaluation["tasks"]["names"] == ["held_out_choice"]
    assert compression["sweep"] == {"workload.bits": [4, 8]}
    assert compression["workload"] == {"method": "awq", "group_size": 32}
    assert (endpoint["launch"]["engine"], endpoint["launch"]["idle_stop_seconds"]) == (OWN, 1800.0)
    assert made["Location"] == f"/workflows/{workflow.pk}/"
    assert jobs(workflow)[0].plan_id == plan["id"]
    first, again = (client.get(made["Location"]).content.decode() for _ in range(2))
    assert ("sk-slipway-" in first, "sk-slipway-" in again) == (True, False)
    assert workflow.name in client_of(vera).get("/workflows/").content.decode()
    client.post(f"/workflows/{workflow.pk}/stop/")
    assert "Resume" in client.get(made["Location"]).content.decode()
    assert "step 1 of <a" in client.get(f"/jobs/{jobs(workflow)[0].pk}/").content.decode()
