"""A host that hands its jobs to Slurm: its kind, its slots, and what its jobs wait for."""

import pytest

from runners.facts import PartitionFacts, SchedulerFacts
from tests.webapp.conftest import claim, client_of, make_beat, make_facts, make_job
from webapp.hosts.cordons import device_words
from webapp.hosts.heartbeats import host_beat
from webapp.hosts.models import Host
from webapp.jobs.models import Job, JobState
from webapp.jobs.reservations import run_checks
from webapp.jobs.services import job_submit
from webapp.jobs.views import scheduler_words
from webapp.queue.words import closed_words

GPU = PartitionFacts(
    name="gpu", is_up=True, time_limit="2-00:00:00", nodes=3, cpus_per_node="64",
    memory_mib="515000", gres="gpu:a100:8",
)  # fmt: skip


def facts(max_jobs: int = 2):
    scheduler = SchedulerFacts(
        version="22.05.8",
        options={"partition": "gpu", "gres": "gpu:1"},
        time_limit_minutes=120,
        max_jobs=max_jobs,
        partitions=(GPU,),
    )
    return make_facts(scheduler=scheduler)


@pytest.fixture
def slurm_host(host) -> Host:
    host_beat(host=host, beat=make_beat(facts=facts(), is_agent_start=True))
    host.refresh_from_db()
    return host


def present(host: Host) -> list[tuple[str, int]]:
    return [(one.kind, one.index) for one in host.devices.filter(is_present=True)]


def test_a_host_whose_facts_name_a_scheduler_is_of_that_kind(slurm_host):
    assert slurm_host.kind == "slurm"
    assert closed_words(slurm_host, Job(num_hosts=1, devices_per_host=1)) == ""


def test_a_host_that_runs_jobs_itself_again_is_an_agent_again(slurm_host):
    host_beat(host=slurm_host, beat=make_beat(facts=make_facts()))

    slurm_host.refresh_from_db()
    assert (slurm_host.kind, present(slurm_host)) == ("agent", [("cpu", 0)])


def test_it_has_a_slot_for_each_job_that_may_be_in_slurm_at_once(slurm_host):
    assert present(slurm_host) == [("slot", 0), ("slot", 1)]
    slot = slurm_host.devices.filter(kind="slot").first()
    assert slot.name == "One job in Slurm, gres gpu:1, partition gpu"
    assert device_words(slot) == "Slot 0"


def test_fewer_slots_leave_the_others_as_not_present(slurm_host):
    host_beat(host=slurm_host, beat=make_beat(facts=facts(max_jobs=1)))

    assert present(slurm_host) == [("slot", 0)]


def test_two_jobs_that_ask_for_a_whole_host_take_a_slot_each(slurm_host, team, alice):
    jobs = [job_submit(job=make_job(team, alice, slurm_host), by="alice") for _ in range(3)]

    held = [job.current_attempt.allocations.count() for job in jobs if job.current_attempt]
    assert held == [1, 1]
    assert [job.state for job in jobs] == [JobState.PREFLIGHT, JobState.PREFLIGHT, JobState.QUEUED]


def test_a_slot_travels_to_the_host_with_the_claim(slurm_host, team, alice):
    job = job_submit(job=make_job(team, alice, slurm_host), by="alice")

    request = claim(job.current_attempt)

    assert [(one.kind, one.index) for one in request.devices] == [("slot", 0)]


def test_the_login_nodes_memory_does_not_keep_a_job_away(slurm_host, team, alice):
    job = make_job(team, alice, slurm_host)
    job.prediction = {"peak_memory_bytes": {"value": 2**60}}

    assert all(check.is_ok for check in run_checks(job, slurm_host))


@pytest.mark.django_db(databases=["default", "metrics"])
def test_a_job_in_slurms_queue_says_what_it_waits_for(slurm_host, team, alice):
    job = job_submit(job=make_job(team, alice, slurm_host), by="alice")
    claim(job.current_attempt)
    status = {
        "attempt_id": job.current_attempt_id, "fence": job.current_attempt.fence,
        "phase": "claimed", "last_seq": 0, "acked_seq": 0, "waits_for": "Slurm (job 7): Resources",
    }  # fmt: skip
    host_beat(host=slurm_host, beat=make_beat(attempts=(status,)))

    page = client_of(alice).get(f"/jobs/{job.pk}/")

    assert "waiting in Slurm (job 7): Resources" in page.content.decode()


def test_a_job_that_runs_waits_for_nothing(attempt):
    attempt.job.state = JobState.RUNNING

    assert scheduler_words(attempt.job) == ""


def test_its_page_shows_scheduler_partitions_and_slots(slurm_host, alice):
    page = client_of(alice).get(f"/hosts/{slurm_host.slug}/").content.decode()

    for words in ("Slurm 22.05.8", "3 nodes of 64 CPUs", "gpu:a100:8", "Slot 1", "gres gpu:1"):
        assert words in page
