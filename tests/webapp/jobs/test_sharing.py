"""Jobs that share a device by memory: who joins whom, and who keeps it alone."""

from datetime import timedelta

import pytest

from tests.webapp.conftest import claim, client_of, make_job
from webapp.accounts.models import Quota
from webapp.core.clock import now
from webapp.hosts.models import Device
from webapp.jobs.models import Allocation, Attempt, Job, JobState
from webapp.jobs.pool_state import USABLE_RATIO
from webapp.jobs.quotas import device_seconds, held_devices
from webapp.jobs.services import job_stop, job_submit
from webapp.jobs.waiting import waiting_sentence

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
    assert waiting_sentence(late).endswith("It is number 2 in the queue.")
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
    first = submit(memory // 2, max_duration_seconds=600)
    large, small, tiny = submit(memory - 1), submit(2), submit(1)
    assert [job.state for job in (large, small)] == [JobState.QUEUED] * 2
    assert tiny.state == JobState.PREFLIGHT  # there is room for it beside the large one too
    job_stop(job=first, by="alice")
    for job in (large, small):
        job.refresh_from_db()
    assert (large.state, small.state) == (JobState.PREFLIGHT, JobState.QUEUED)
    job_stop(job=small, by="alice")
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


def test_what_it_waits_for_is_said_in_memory_with_the_end_of_the_one_that_leaves(
    submit, memory, alice, host
):
    first = submit(memory - 1024**3, max_duration_seconds=1800)
    waiting = submit(2 * 1024**3)
    words = waiting_sentence(waiting)
    assert words.startswith(
        f"It needs 2.00\xa0GiB of a device that jobs share, on {host.name}; {host.name} has "
        "1.00\xa0GiB left on a device; next free ≈ "
    )
    assert f"when “{first.name}” ends (predicted, with a margin)." in words
    page = client_of(alice).get("/queue/").content.decode()
    assert "1.00\xa0GiB left to share" in page


def test_a_team_at_its_limit_shares_the_devices_that_it_holds(submit, team, memory):
    Quota.objects.create(team=team, max_devices=1)
    first, second = submit(memory // 2), submit(memory // 4)
    assert (first.state, second.state) == (JobState.PREFLIGHT, JobState.PREFLIGHT)
    third = submit(memory // 2)
    assert third.state == JobState.QUEUED
    assert "released, or " in waiting_sentence(third)
    assert "of one that its jobs share." in waiting_sentence(third)
    job_stop(job=second, by="alice")
    third.refresh_from_db()
    assert third.state == JobState.PREFLIGHT


def test_a_team_above_its_limit_shares_what_it_holds_and_gets_nothing_else(submit, team, memory):
    first = Device.objects.get()
    fields = {"host": first.host, "name": first.name, "memory_bytes": first.memory_bytes}
    Device.objects.create(index=1, kind="cpu", uuid="second", **fields)
    for _ in range(2):
        submit(memory - 1024**2)
    assert len(held_devices(team)) == 2
    Quota.objects.create(team=team, max_devices=1)
    assert submit(1024).state == JobState.PREFLIGHT
    assert submit(memory // 2).state == JobState.QUEUED


def test_where_another_process_runs_nothing_is_left_to_share(submit, memory, host, alice):
    submit(memory // 2)
    Device.objects.update(kind="gpu", uuid="g1")
    load = {"uuid": "g1", "memory_used_bytes": 1, "utilization": 0.5, "foreign_pids": [4321]}
    host.refresh_from_db()
    type(host).objects.filter(pk=host.pk).update(last_beat={**host.last_beat, "gpus": [load]})
    waiting = submit(memory // 4)
    assert waiting.state == JobState.QUEUED
    assert "has 0" in waiting_sentence(waiting)
    page = client_of(alice).get("/queue/").content.decode()
    assert "used by another process too, so that nobody joins" in page


def test_gpu_hours_count_the_part_of_a_device_that_a_job_asked_for(submit, team, memory):
    Device.objects.update(kind="gpu")
    quarter = Device.objects.get().memory_bytes // 4
    for part in (quarter, 2 * quarter):
        submit(part)
    Allocation.objects.update(taken_at=now() - timedelta(hours=2))
    used = device_seconds(Allocation.objects.all(), now() - timedelta(hours=1))
    assert used == {team.pk: pytest.approx(0.75 * 3600, abs=5)}


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
