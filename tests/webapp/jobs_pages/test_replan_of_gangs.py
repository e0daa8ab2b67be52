"""A job on several hosts that ran out of memory is planned again by one press."""

import pytest

from tests.webapp.conftest import EXIT_OK, client_of, make_microbench
from tests.webapp.jobs.gangs import make_hosts, members, start, tell
from tests.webapp.jobs.test_memory_terms import tell as tell_metrics
from webapp.hosts.models import Host
from webapp.jobs.models import Job
from webapp.plans.launching import plan_launch
from webapp.plans.models import Plan
from webapp.plans.planning import plan_compute
from webapp.wizard.drafts import demo_draft

pytestmark = pytest.mark.django_db(databases="__all__")

REFUSED = 64 * 2**20
LINE = "Unable to allocate 64.0 MiB for an array"


@pytest.fixture
def starved(team, alice) -> Job:
    """A plan over a pool of two hosts, launched; the second needed three times its prediction."""
    hosts = make_hosts(team, 2)
    Host.objects.update(microbench=make_microbench().model_dump(mode="json"))
    draft = demo_draft(Host.objects.get(pk=hosts[0].pk))
    draft["hardware"]["choice"] = f"pool:{hosts[0].pool_id}"
    plan = Plan.objects.create(team=team, owner=alice, name="demo", draft=draft)
    plan_compute(plan)
    job = plan_launch(plan=plan, by=alice)
    predicted = job.estimate["memory"]["per_device_peak_bytes"]
    for member in start(job):
        is_second = member.node_rank == 1
        peak = predicted * (3.0 if is_second else 1.0)
        tell_metrics(member, "host", {"rss_bytes": peak / 2}, {"rss_bytes": peak})
    first, second = members(job)
    record = EXIT_OK | {"exit_code": 1, "last_lines": [LINE], "reason": "oom_host"}
    tell(second, ("exited", record))
    tell(first, ("exited", EXIT_OK | {"exit_code": 1, "reason": "rank_lost", "ended_at_ms": 9}))
    return Job.objects.get(pk=job.pk)


def test_the_new_plan_keeps_to_what_the_host_that_ran_out_needed(starved, alice):
    assert (starved.state, starved.reason) == ("failed", "oom_host")

    client_of(alice).post(f"/jobs/{starved.pk}/replan/", {"how": "memory"})

    plan = Plan.objects.exclude(pk=starved.plan_id).get()
    before = starved.estimate["memory"]["per_device_peak_bytes"]
    limit = plan.request["constraints"]["per_device_peak_bytes"]["max"]
    needed = 3 * before + REFUSED
    assert limit == pytest.approx(3 * before / (needed / before), rel=0.01)


def test_it_is_a_plan_for_the_same_pool(starved, alice):
    client_of(alice).post(f"/jobs/{starved.pk}/replan/", {"how": "memory"})

    plan = Plan.objects.exclude(pk=starved.plan_id).get()
    assert plan.draft["hardware"]["choice"] == f"pool:{starved.pool_id}"
    assert plan.request["cluster"]["nodes"] == 2


def test_the_page_offers_it(starved, alice):
    text = client_of(alice).get(f"/jobs/{starved.pk}/post-mortem/").content.decode()

    assert "Plan again with what it needed" in text
    assert "Memory of Box 2 against its prediction" in text
