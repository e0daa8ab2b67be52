"""What several hosts measure together: told of the job, and changes no single host."""

import pytest

from tests.webapp.conftest import client_of, make_beat, make_microbench
from tests.webapp.jobs.gangs import end, make_gang, make_hosts, members, start, tell
from tests.webapp.jobs.test_finish import MEASURED, PREDICTION, finish, plan_request, submitted
from webapp.home.views import accuracy_for
from webapp.hosts.heartbeats import host_beat
from webapp.hosts.models import Host
from webapp.hosts.views import accuracy_of, jobs_together
from webapp.jobs.calibration import recalibrate
from webapp.jobs.models import Job, Measurement

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def together(team, alice, django_capture_on_commit_callbacks) -> Job:
    """A training on two hosts that ended well and measured what was predicted for it."""
    hosts = make_hosts(team, 2)
    host_beat(host=hosts[0], beat=make_beat(microbench=make_microbench()))
    asked = plan_request(Host.objects.get(pk=hosts[0].pk))
    job = make_gang(team, alice, hosts)
    Job.objects.filter(pk=job.pk).update(prediction=PREDICTION, plan_request=asked)
    with django_capture_on_commit_callbacks(execute=True):
        first, *others = start(job)
        tell(first, ("result", {"measured": MEASURED}))
        for member in (first, *others):
            end(member)
    return Job.objects.get(pk=job.pk)


def test_it_is_set_beside_the_prediction(together):
    assert together.state == "succeeded"
    assert Measurement.objects.get(metric="step_seconds").ratio == 2.0


def test_neither_host_learns_factors_from_it(together):
    for member in members(together):
        assert member.host.calibration == {}
        assert recalibrate(member.host).factors == {}


def test_a_host_still_learns_from_what_it_runs_alone(
    together, team, alice, django_capture_on_commit_callbacks
):
    leader = Host.objects.get(name="Box 1")
    with django_capture_on_commit_callbacks(execute=True):
        finish(submitted(team, alice, leader))

    assert any(each.n for each in recalibrate(leader).factors.values())


def test_it_does_not_count_as_how_well_plans_hold_on_the_first_host(together, alice):
    leader = members(together)[0].host

    assert accuracy_of(leader) is None
    assert accuracy_for(alice).num_jobs == 1  # how good predictions are over all


def test_both_hosts_pages_say_how_many_were_left_out(together, alice):
    for member in members(together):
        assert jobs_together(member.host) == 1
        text = client_of(alice).get(f"/hosts/{member.host.slug}/").content.decode()
        assert "Not counted here: 1 job that ran together with other hosts" in text


def test_the_jobs_page_says_so_too(together, alice):
    text = client_of(alice).get(f"/jobs/{together.pk}/").content.decode()

    assert "Measured by 2 hosts together, so it changes the factors of none of them." in text
