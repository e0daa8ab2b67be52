"""Who holds which devices, from the choice to the end of the attempt."""

from datetime import timedelta

import pytest
from django.db import IntegrityError, transaction

from tests.webapp.conftest import EXIT_OK, GIB, batch_of, claim, make_facts, make_job, new_attempt
from webapp.core.clock import now
from webapp.hosts.models import Device, Host
from webapp.hosts.pools import devices_sync
from webapp.jobs.deadlines import GRACE_BEATS, end_unclaimed, end_unknown_attempts
from webapp.jobs.ingest import events_accept
from webapp.jobs.models import Allocation, Event, Job
from webapp.jobs.reservations import devices_take
from webapp.jobs.services import job_abandon, job_stop, job_submit

pytestmark = pytest.mark.django_db(databases="__all__")


def held() -> list[str]:
    return sorted(
        Allocation.objects.filter(released_at=None).values_list("device__uuid", flat=True)
    )


def with_gpus(host: Host, count: int) -> Host:
    gpus = [
        {"index": i, "uuid": f"GPU-{i}", "name": "NVIDIA L4", "memory_bytes": 24 * GIB}
        for i in range(count)
    ]
    devices_sync(host, make_facts(gpus=gpus))
    return host


def test_a_queued_job_has_no_attempt_and_holds_nothing(team, alice, host):
    Host.objects.update(state="draining")
    job = job_submit(job=make_job(team, alice, host), by="alice")
    assert (job.current_attempt, job.host, held()) == (None, None, [])


def test_a_job_that_got_its_turn_holds_the_hosts_devices(job):
    assert (job.host.name, held()) == ("Box", ["cpu"])


def test_two_jobs_share_a_host_each_on_devices_of_its_own(team, alice, host):
    with_gpus(host, 3)
    first, second = (
        job_submit(job=make_job(team, alice, host, devices_per_host=1), by="alice")
        for _ in range(2)
    )
    assert (first.state, second.state, held()) == ("preflight", "preflight", ["GPU-0", "GPU-1"])


def test_a_claim_says_which_devices_are_the_jobs_own(team, alice, host):
    with_gpus(host, 2)
    job = job_submit(job=make_job(team, alice, host, devices_per_host=2), by="alice")
    request = claim(job.current_attempt)
    assert [(one.kind, one.index, one.uuid) for one in request.devices] == [
        ("gpu", 0, "GPU-0"),
        ("gpu", 1, "GPU-1"),
    ]


def test_the_database_refuses_a_second_holder(job):
    other = new_attempt(job)
    with pytest.raises(IntegrityError), transaction.atomic():
        devices_take(attempt=other, devices=Device.objects.all())


def test_the_exit_of_an_attempt_frees_its_devices(attempt):
    events_accept(host=attempt.host, batch=batch_of(attempt, ("exited", EXIT_OK)))
    assert held() == []


def test_a_stop_before_the_claim_frees_the_devices(job):
    job_stop(job=job, by="alice")
    assert held() == []


def test_a_stop_after_the_claim_waits_for_the_host_to_confirm(attempt):
    job_stop(job=attempt.job, by="alice")
    assert held() == ["cpu"]


def test_silence_frees_nothing_until_a_person_gives_the_job_up(attempt):
    Host.objects.update(last_seen_at=now() - timedelta(hours=3))
    end_unclaimed()
    assert held() == ["cpu"]
    job = Job.objects.get(pk=attempt.job_id)
    job_abandon(job=job, by="alice", typed_host_name="Box")
    assert held() == []


def test_a_start_that_nobody_took_frees_the_devices(job):
    Event.objects.filter(subject=job.pk).update(at=now() - timedelta(seconds=130))
    end_unclaimed()
    assert held() == []


def test_an_attempt_that_its_host_does_not_know_frees_the_devices(attempt):
    for _ in range(GRACE_BEATS + 1):
        end_unknown_attempts({attempt.host_id: []})
    assert held() == []
