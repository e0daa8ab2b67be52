"""The budget of a token, which every operation that starts a job is held to."""

from datetime import timedelta

import pytest
from django.test import Client

from runners.jobspec import ArtefactModel, CompressSpec
from tests.webapp.api import test_matrix
from tests.webapp.api.operations import operations
from tests.webapp.conftest import batch_of, enrol, make_beat, make_job, make_microbench
from tests.webapp.jobs.gangs import silence
from webapp.accounts.models import AccessToken, Membership, Quota
from webapp.accounts.tokens import acting_as, acting_token, token_make
from webapp.agents.heartbeats import host_beat
from webapp.agents.ingest import events_accept
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.problems import Problem
from webapp.deployments.models import Deployment
from webapp.jobs.budgets import cost_gpu_hours, spent_gpu_hours
from webapp.jobs.models import Allocation, Job, TokenLaunch
from webapp.jobs.services import job_submit
from webapp.modelhub.models import TeamModel, demo_config
from webapp.plans.models import Plan
from webapp.wizard.drafts import demo_document, serve_document, stored_draft

pytestmark = pytest.mark.django_db(databases="__all__")
arguments, second = test_matrix.arguments, test_matrix.second
STARTS_JOBS = {
    "launch_plan", "run_job_again", "abandon_job", "validate_host", "evaluate_model",
    "launch_classification", "launch_document", "start_workflow", "resume_workflow",
    "wake_deployment", "start_tuning", "publish_model",
}  # fmt: skip
STARTED = {"pid": 7, "boot_id": "boot-1", "argv": ["python"]}


def client_with(user, team, budget: float | None) -> Client:
    text = token_make(team=team, by=user, name="agent", scope="admin", budget_gpu_hours=budget)[1]
    return Client(headers={"Authorization": f"Bearer {text}"})


@pytest.fixture
def admin(olga):
    Membership.objects.filter(user=olga).update(role="admin")
    return olga


@pytest.fixture
def starting(arguments, team, alice, host, attempt, monkeypatch) -> dict[str, str]:
    """Arguments and bodies with which each operation that can start a job starts one."""
    events_accept(host=host, batch=batch_of(attempt, ("started", STARTED)))
    silence(host, minutes=4)
    other, _ = enrol(team, name="Other")
    host_beat(host=other, beat=make_beat(microbench=make_microbench()))
    silence(other, minutes=-60)  # it stays live, however long the test takes
    plan = Plan.objects.create(
        team=team, owner=alice, name="demo", draft=stored_draft(demo_document(other))
    )
    source = CompressSpec(model=ArtefactModel(attempt_id="01TRAINED"), method="int8")
    model = TeamModel.objects.create(
        team=team, name="int8", source="job", config=demo_config(), host=other,
        attempt_id="01COMPRESSED", artefact_name="model", weight_dtype="int8",
        facts={"job": make_job(team, alice, other, spec=source).pk},
    )  # fmt: skip
    monkeypatch.setitem(
        test_matrix.BODIES, "abandon_job", {"host_name": host.name, "elsewhere": other.slug}
    )
    monkeypatch.setitem(test_matrix.BODIES, "launch_classification", {"host": other.slug})
    first = {"goal": "pretrain", "model": "demo", "hardware": {"host": other.slug}}
    monkeypatch.setitem(test_matrix.BODIES, "start_workflow", {"steps": [first]})
    served = stored_draft(serve_document(other))
    served["model"] = {"source": "team", "team_model": model.pk}
    kept = Plan.objects.create(team=team, owner=alice, draft=served, state="computed")
    Deployment.objects.update(plan=kept)
    return arguments | {
        "job_id": attempt.job_id, "plan_id": plan.pk, "slug": other.slug, "model_id": model.pk,
    }  # fmt: skip


def submitted() -> set[str]:
    return set(Job.objects.exclude(state="draft").values_list("pk", flat=True))


def test_no_operation_starts_a_job_beyond_the_budget(admin, team, starting):
    free, bound = client_with(admin, team, None), client_with(admin, team, 0.0)
    before, started, wrong = submitted(), set(), {}
    for each in operations():
        if each.method == "GET":
            continue
        with test_matrix.transaction.atomic():
            test_matrix.send(free, each, starting)
            if submitted() != before:
                started.add(each.name)
            test_matrix.transaction.set_rollback(True)
        with test_matrix.transaction.atomic():
            answer = test_matrix.send(bound, each, starting)
            code = answer.json()["code"] if each.name in STARTS_JOBS else "-"
            if submitted() != before or code not in {"-", "over_budget", "max_duration_seconds"}:
                wrong[each.name] = (answer.status_code, code)
            test_matrix.transaction.set_rollback(True)
    assert not wrong
    assert started == STARTS_JOBS


def test_a_refused_job_leaves_no_draft_and_an_abandoned_one_as_it_was(admin, team, starting):
    drafts = Job.objects.filter(state="draft").count()
    client = client_with(admin, team, 0.0)
    for name in ("run_job_again", "validate_host", "abandon_job", "launch_classification"):
        each = next(one for one in operations() if one.name == name)
        assert test_matrix.send(client, each, starting).status_code in {409, 422}, name
    assert Job.objects.filter(state="draft").count() == drafts
    assert Job.objects.get(pk=starting["job_id"]).state == "running"


def test_what_a_job_can_take_counts_until_it_ends_and_then_what_it_held(alice, team, host):
    token = token_make(team=team, by=alice, name="a", scope="launch", budget_gpu_hours=5.0)[0]
    job = make_job(team, alice, host, max_duration_seconds=3600.0, max_retries=1)
    assert cost_gpu_hours(job) == 2.0  # each attempt has the limit to itself
    with acting_as(token):
        job_submit(job=job, by="alice")
    assert (acting_token(), spent_gpu_hours(token)) == (None, 2.0)
    taken = now() - timedelta(minutes=30)
    rows = Allocation.objects.filter(attempt__job=job)
    assert rows.update(taken_at=taken, released_at=now()) == 1
    assert spent_gpu_hours(token) == 2.0
    Job.objects.filter(pk=job.pk).update(state="failed", ended_at=now())
    assert spent_gpu_hours(token) == pytest.approx(0.5, abs=0.01)
    stale = Job.objects.get(pk=job.pk)
    stale.state = "draft"  # as a launch that was repeated at the same time has read it
    with acting_as(token):
        job_submit(job=stale, by="alice")
    # by a person, and by a token without a budget, nothing is counted
    for acting in (None, token_make(team=team, by=alice, name="b", scope="launch")[0]):
        with acting_as(acting):
            job_submit(job=make_job(team, alice, host), by="alice")
    assert TokenLaunch.objects.count() == Event.objects.filter(kind="token.launched").count() == 1


def test_the_limit_of_the_team_bounds_what_a_job_can_take(alice, team, host):
    Quota.objects.create(team=team, max_duration_seconds=1800.0)
    token = token_make(team=team, by=alice, name="a", scope="launch", budget_gpu_hours=0.5)[0]
    with acting_as(token):
        job_submit(job=make_job(team, alice, host), by="alice")
        with pytest.raises(Problem, match=r"may take 0\.5 GPU-hours, and of the 0\.5"):
            job_submit(job=make_job(team, alice, host), by="alice")
    assert AccessToken.objects.get().launches.get().gpu_hours == 0.5


def test_a_token_with_a_budget_makes_no_token_without_one(admin, team, arguments):
    each = next(one for one in operations() if one.name == "make_token")
    answer = test_matrix.send(client_with(admin, team, 1.0), each, arguments)
    assert (answer.status_code, answer.json()["code"]) == (403, "has_budget")
    assert test_matrix.send(client_with(admin, team, None), each, arguments).status_code == 201
