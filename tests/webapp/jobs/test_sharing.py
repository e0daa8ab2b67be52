"""Jobs that share a device by memory: who joins whom, and who keeps it alone."""

from datetime import timedelta

import pytest

from tests.webapp.conftest import claim, client_of, make_job
from webapp.core.clock import now
from webapp.hosts.models import Device
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.models import Allocation, Attempt, Job, JobState
from webapp.jobs.services import job_stop, job_submit
from webapp.jobs.sharing import USABLE_RATIO

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def memory(host) -> int:
    """The usable memory of the host's one device."""
    return int(USABLE_RATIO * Device.objects.get().memory_bytes)


@pytest.fixture
def submit(team, alice, host):
    def submit(shared_bytes: int | None, **fields) -> Job:
        job = make_job(team, alice, host, **fields)
        Job.objects.filter(pk=job.pk).update(shared_bytes=shared_bytes)
        job.refresh_from_db()
        return job_submit(job=job, by="alice")

    return submit


def test_jobs_that_share_fill_a_device_and_one_that_does_not_waits_for_all(submit, memory):
    half = memory // 2
    first, second = submit(half), submit(half)
    assert (first.state, second.state) == (JobState.PREFLIGHT, JobState.PREFLIGHT)
    third, alone = submit(1), submit(None)
    assert (third.state, alone.state) == (JobState.QUEUED, JobState.QUEUED)  # no room
    held = Allocation.objects.filter(released_at=None).values_list("shared_bytes", flat=True)
    assert list(held) == [half, half]
    job_stop(job=first, by="alice")
    third.refresh_from_db()
    assert third.state == JobState.PREFLIGHT  # it was queued before the one that wants all
    late = submit(1)
    assert late.state == JobState.QUEUED  # and this one after it
    for job in (second, third):
        job_stop(job=job, by="alice")
    alone.refresh_from_db()
    late.refresh_from_db()
    assert (alone.state, late.state) == (JobState.PREFLIGHT, JobState.QUEUED)


def test_nobody_joins_a_device_that_is_held_alone_closed_or_of_another_host(
    submit, memory, host, other_host
):
    assert submit(None).state == JobState.PREFLIGHT
    assert submit(1).state == JobState.QUEUED
    Job.objects.update(state="stopped")
    Allocation.objects.update(released_at=now())
    assert submit(1).state == JobState.PREFLIGHT
    Device.objects.filter(host=host).update(cordoned_at=now())
    assert submit(1).state == JobState.QUEUED
    Device.objects.filter(host=host).update(cordoned_at=None)
    type(host).objects.filter(pk=host.pk).update(last_seen_at=now() - timedelta(hours=1))
    assert submit(1).state == JobState.QUEUED


def test_one_that_has_no_room_yet_keeps_its_place_and_one_that_cannot_start_keeps_none(
    submit, memory
):
    first = submit(memory // 2)
    large, small = submit(memory - 1), submit(1)
    assert (large.state, small.state) == (JobState.QUEUED, JobState.QUEUED)
    job_stop(job=first, by="alice")
    allocate_pool(small.pool)  # as the ticker does
    for job in (large, small):
        job.refresh_from_db()
    assert (large.state, small.state) == (JobState.PREFLIGHT, JobState.PREFLIGHT)
    gang = submit(None, num_hosts=2, devices_per_host=1)
    assert gang.state == JobState.QUEUED
    job_stop(job=large, by="alice")
    assert submit(1).state == JobState.PREFLIGHT


def test_memory_that_a_job_left_since_the_last_heartbeat_refuses_nobody(submit, memory, host):
    first = submit(1)
    beat = {**host.last_beat, "memory_available_bytes": 1}
    type(host).objects.filter(pk=host.pk).update(last_beat=beat)
    peak = {"peak_memory_bytes": {"value": 1e9, "unit": "bytes"}}
    assert submit(1, prediction=peak).state == JobState.QUEUED
    job_stop(job=first, by="alice")
    assert submit(1, prediction=peak).state == JobState.PREFLIGHT


def test_an_older_job_of_lower_priority_keeps_no_device_from_others(submit, memory):
    submit(1)
    low = submit(None, priority=-1)
    assert low.state == JobState.QUEUED
    assert submit(1).state == JobState.PREFLIGHT


def test_a_host_runs_and_shows_all_that_share_its_device(submit, memory, host, alice):
    jobs = [submit(1024**2), submit(1024**2)]
    devices = {
        claim(Attempt.objects.get(pk=each.current_attempt_id)).devices[0].index for each in jobs
    }
    assert len(devices) == 1
    page = client_of(alice).get(f"/hosts/{host.slug}/").content.decode()
    assert page.count("(1.00") == 2
    reply = client_of(alice).get(f"/api/v1/hosts/{host.slug}").json()
    assert reply["devices"][0]["jobs"] == [each.pk for each in jobs]
