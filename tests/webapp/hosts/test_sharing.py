"""A host runs the jobs of one team, and of others only where somebody shared its pool."""

import pytest

from runners.jobspec import TrainSpec
from tests.webapp.conftest import make_job
from webapp.core.problems import InvalidProblem
from webapp.hosts.pools import teams_of
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.models import Allocation, Attempt, Job
from webapp.jobs.services import job_create, job_submit
from webapp.queue.words import waiting_line

pytestmark = pytest.mark.django_db(databases="__all__")


def test_a_new_pool_serves_its_own_team_alone(host, team):
    assert teams_of(host.pool) == {team.pk}


def test_another_teams_job_is_taken_neither_for_the_host_nor_for_its_pool(
    host, other_team, charlie
):
    with pytest.raises(InvalidProblem, match="belongs to another team"):
        make_job(other_team, charlie, host)
    with pytest.raises(InvalidProblem):
        job_create(
            team=other_team, owner=charlie, pool=host.pool, spec=TrainSpec(), name="T", model_name="m"
        )  # fmt: skip
    assert not Job.objects.exists()


def test_a_pool_that_was_shared_takes_it(host, other_team, charlie):
    host.pool.shared_with.add(other_team)
    job = job_submit(job=make_job(other_team, charlie, host), by="charlie")
    assert Attempt.objects.get(job=job).host == host


@pytest.fixture
def guest(host, job, other_team, charlie) -> Job:
    """A job of another team that waits behind alice's, in a pool that was shared with it."""
    host.pool.shared_with.add(other_team)
    return job_submit(job=make_job(other_team, charlie, host), by="charlie")


def test_a_job_that_waits_does_not_start_once_its_pool_is_shared_no_more(guest, host):
    host.pool.shared_with.clear()
    Allocation.objects.all().delete()
    assert allocate_pool(host.pool) == []
    line = waiting_line(guest)
    assert line is not None
    assert "not shared with yours any more" in line.sentence


def test_it_starts_when_it_is_shared_again(guest, host, other_team):
    host.pool.shared_with.clear()
    Allocation.objects.all().delete()
    allocate_pool(host.pool)
    host.pool.shared_with.add(other_team)
    assert [job.pk for job in allocate_pool(host.pool)] == [guest.pk]
