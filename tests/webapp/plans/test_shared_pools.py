"""Pools that another team shares: offered, launched through the queue, never told whose."""

import pytest
from django.urls import reverse

from runners.plans.document import ModelChoice
from runners.plans.refusals import DraftProblem
from tests.webapp.conftest import claim, client_of, make_microbench
from tests.webapp.jobs.gangs import make_hosts
from webapp.hosts.models import Host, Pool
from webapp.jobs.launching import launchable_of, plan_launch
from webapp.jobs.models import Job
from webapp.modelhub.models import TeamModel
from webapp.plans.models import Plan
from webapp.plans.planning import plan_compute
from webapp.wizard.drafts import demo_document, new_document, options_for, stored_draft, summaries

pytestmark = pytest.mark.django_db(databases="__all__")

FACTOR = {"factor": 1.3, "n": 4, "spread": 0.1}


@pytest.fixture
def hosts(team) -> list[Host]:
    """Two measured hosts of alice's team, one of which knows its factors."""
    made = make_hosts(team, 2)
    bench = make_microbench().model_dump(mode="json")
    known = {"host": "box-1", "factors": {"compute": FACTOR}, "digest": "d"}
    Host.objects.update(microbench=bench, calibration=known)
    for host in made:
        host.refresh_from_db()
    return made


@pytest.fixture
def shared(hosts, other_team) -> Pool:
    """Their pool, in which charlie's team may launch."""
    hosts[0].pool.shared_with.add(other_team)
    return hosts[0].pool


@pytest.fixture
def make_plan(other_team, charlie, shared):
    """Charlie's plan for that pool."""

    def make(goal: str = "pretrain") -> Plan:
        draft = stored_draft(new_document(goal, ModelChoice(source="demo"), None))
        draft["hardware"]["pool"] = shared.pk
        plan = Plan.objects.create(team=other_team, owner=charlie, draft=draft)
        plan_compute(plan)
        return plan

    return make


def text_of(user, name: str, *args: str) -> str:
    return client_of(user).get(reverse(name, args=args)).content.decode()


# What is offered


def test_the_wizard_offers_it_by_its_name_and_team_and_names_no_host(
    make_plan, charlie, team, alice, hosts, shared
):
    text = text_of(charlie, "plan-step", make_plan().pk, "hardware")
    assert "Pool default of Alice&#x27;s team" in text
    assert "2 hosts with 2 cores, no GPU" in text
    text = text_of(charlie, "plan-step", make_plan().pk, "hardware")
    assert "Box 1" not in text
    assert "host:" not in text

    plan = make_plan()
    assert (
        summaries(plan.document, options_for(plan).names_of(plan.document))["hardware"]
        == "pool default of Alice's team"
    )

    plan = Plan.objects.create(team=team, owner=alice, draft=stored_draft(demo_document(hosts[0])))
    text = text_of(alice, "plan-step", plan.pk, "hardware")
    assert "2 hosts: Box 1, Box 2" in text


def test_one_ready_host_is_enough_in_another_teams_pool(make_plan, hosts, other_team):
    Host.objects.filter(pk=hosts[1].pk).update(state="draining")
    plan = make_plan()
    assert [pool.slug for pool, _ in options_for(plan).pools] == ["default"]
    assert launchable_of(plan).spread.num_hosts == 1


# What the plan says


def test_the_plan_keeps_the_speed_and_not_whose_it_is(make_plan, charlie):
    request = make_plan().request
    assert request["cluster"]["device"]["id"] == "pool-default"
    assert request["cluster"]["device"]["source"] == "measured in default of Alice's team"
    assert request["host_calibration"]["host"] == "pool-default"
    assert request["host_calibration"]["factors"]["compute"]["n"] == 4

    plan = make_plan()
    for tab in ("summary", "alternatives", "why"):
        assert "box-1" not in text_of(charlie, "plan-tab", plan.pk, tab).lower().replace(" ", "-")


# Launching


def test_a_launch_runs_on_all_its_hosts_and_the_next_waits_in_its_queue(
    make_plan, charlie, shared
):
    job = plan_launch(plan=make_plan(), by=charlie)
    assert (job.state, job.num_hosts, job.requested_host) == ("preflight", 2, None)

    job = plan_launch(plan=make_plan(), by=charlie)
    assert (job.state, job.pool, job.team) == ("queued", shared, charlie.memberships.get().team)


def test_once_it_is_shared_no_more_nothing_is_launched(make_plan, shared, charlie, other_team):
    plan = make_plan()
    shared.shared_with.remove(other_team)
    with pytest.raises(DraftProblem, match="too few ready hosts for your team"):
        plan_launch(plan=plan, by=charlie)
    assert not Job.objects.exists()


# A job there


@pytest.fixture
def ran(make_plan, charlie) -> Job:
    job = plan_launch(plan=make_plan("generate"), by=charlie)
    claim(job.current_attempt)
    return Job.objects.get(pk=job.pk)


def test_its_page_names_the_host_without_a_way_to_its_page(ran, charlie):
    text = text_of(charlie, "job-detail", ran.pk)
    assert f"{ran.host.name} <span>of Alice&#x27;s team</span>" in text
    assert f"/hosts/{ran.host.slug}/" not in text
    assert client_of(charlie).get(f"/hosts/{ran.host.slug}/").status_code == 404


def test_its_config_tells_what_results_depend_on_and_no_address(ran, charlie):
    text = text_of(charlie, "job-config", ran.pk)
    assert "Test CPU" in text
    assert "10.0.0." not in text


def test_a_model_that_lies_in_the_pool_is_used_where_it_lies(make_plan, ran, hosts, other_team):
    model = TeamModel.objects.create(
        team=other_team, name="mine", source="job", host=hosts[1], artefact_name="model",
        attempt_id=ran.current_attempt_id, config=ran.spec["model"]["config"],
    )  # fmt: skip
    plan = make_plan("generate")
    plan.draft["model"] |= {"source": "team", "team_model": model.pk}
    plan_compute(plan)

    launch = launchable_of(plan)

    assert (launch.is_pinned, launch.host) == (True, hosts[1])
