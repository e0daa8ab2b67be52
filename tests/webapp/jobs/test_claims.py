"""The claim: one gets the spec, a host looks at itself, and gangs learn where to meet."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import IntegrityError, connections, transaction
from pydantic import ValidationError

from runners.jobspec import BenchmarkSpec, FileData, FolderModel, ServeSpec, TrainSpec
from runners.shared.messages import ClaimRequest, PreflightCheck
from tests.webapp.conftest import GIB, claim, enrol, make_beat, make_facts, make_job, new_attempt
from tests.webapp.jobs.gangs import make_gang, make_hosts, members, start
from tests.webapp.jobs.undone import undone
from webapp.agents.dispatch import attempt_claim, needs_of
from webapp.agents.heartbeats import host_beat
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem
from webapp.hosts.models import Host
from webapp.hosts.pools import devices_sync
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.gangs import free_port, gang_of
from webapp.jobs.models import Attempt, Command, Job
from webapp.jobs.services import job_stop, job_submit
from webapp.jobs.waiting import waiting_sentence

pytestmark = pytest.mark.django_db(databases="__all__")


def test_one_claim_gets_the_spec_as_often_as_it_asks_and_hears_the_doorbell(job):
    with pytest.raises(ConflictProblem, match="fence"):
        claim(job.current_attempt, fence="0" * 32)
    request = claim(job.current_attempt)
    assert (request.attempt_id, request.spec.kind) == (job.current_attempt_id, "train")
    assert claim(job.current_attempt) == request
    with pytest.raises(ConflictProblem, match="another folder"):
        claim(job.current_attempt, "folder-2")
    assert Command.objects.get(attempt=job.current_attempt).state == "acked"


def test_a_stopped_job_cannot_be_claimed(job):
    job_stop(job=job, by="alice")
    with pytest.raises(ConflictProblem):
        claim(job.current_attempt, "")
    with pytest.raises(ConflictProblem, match="not to be run"):
        claim(job.current_attempt)


def test_another_host_cannot_claim(job, team):
    stranger, _ = enrol(team, name="Stranger")
    attempt = Attempt.objects.get(pk=job.current_attempt_id)
    attempt.host = stranger
    with pytest.raises(ConflictProblem):
        claim(attempt)


def test_a_superseded_attempt_cannot_be_claimed(job):
    old = job.current_attempt
    new_attempt(job)
    with pytest.raises(ConflictProblem):
        claim(old)


def test_the_claim_keeps_the_hosts_facts_with_the_attempt(attempt):
    assert attempt.facts["cpu_model"] == "Test CPU"


def test_the_jobs_that_others_ran_on_the_host_are_not_kept_with_the_attempt(job):
    attempt = Attempt.objects.get(pk=job.current_attempt_id)
    told = {"kind": "slurm", "version": "22.05.8", "other_jobs": [{"job_id": "7"}],
            "num_other_jobs": 1}  # fmt: skip
    Host.objects.update(facts={**attempt.host.facts, "scheduler": told})
    attempt.refresh_from_db()
    claim(attempt)
    attempt.refresh_from_db()
    assert attempt.facts["scheduler"] == {"kind": "slurm", "version": "22.05.8"}
    assert attempt.host.facts["scheduler"] == told


@pytest.mark.django_db(transaction=True, databases="__all__")
def test_of_eight_racing_claims_one_wins(job):
    start = threading.Barrier(8)

    def race(number: int) -> bool:
        start.wait()
        try:
            claim(job.current_attempt, f"folder-{number}")
        except ConflictProblem:
            return False
        finally:
            connections.close_all()
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(race, range(8)))
    assert won.count(True) == 1
    assert Job.objects.get(pk=job.pk).state == "starting"


# Where the hosts of a job meet: an address each, and a port that no other gang has.


@pytest.fixture
def hosts(team):
    return make_hosts(team, 2)


def reply_to(member: Attempt, **checks: bool):
    """Return what a host is answered whose preflight came out so."""
    found = tuple(PreflightCheck(name=name, ok=ok, sentence=name) for name, ok in checks.items())
    request = claim_request(member, found)
    return attempt_claim(attempt_id=member.pk, host=member.host, request=request)


def claim_request(member: Attempt, checks=()):
    return ClaimRequest(fence=member.fence, claim_id="folder", boot_id="boot-1", checks=checks)


def test_every_host_learns_where_the_first_is_and_who_it_is_itself(team, alice, hosts):
    first, second = (gang_of(member) for member in members(make_gang(team, alice, hosts)))
    assert (first.master_address, first.master_port) == ("10.0.0.1", 29400)
    assert (second.master_address, second.own_address) == ("10.0.0.1", "10.0.0.2")
    assert (second.node_rank, second.num_nodes, second.num_processes) == (1, 2, 1)
    assert first.rendezvous_id == second.rendezvous_id


def test_the_address_that_the_operator_chose_comes_before_the_first(team, alice, hosts):
    facts = hosts[0].facts | {"addresses": ["10.0.0.1", "192.168.7.1"]}
    Host.objects.filter(pk=hosts[0].pk).update(facts=facts, address="192.168.7.1")
    job = make_gang(team, alice, hosts)
    assert {member.address for member in members(job)} == {"10.0.0.2", "192.168.7.1"}


def test_a_host_without_an_address_sends_the_job_back_with_the_way_out(team, alice, hosts):
    Host.objects.filter(pk=hosts[1].pk).update(facts=hosts[1].facts | {"addresses": []})
    job = make_gang(team, alice, hosts)
    assert (job.state, job.reason) == ("queued", "preflight_failed")


def test_two_gangs_on_one_host_meet_at_different_ports(team, alice, hosts):
    gpus = [{"index": i, "uuid": f"G{i}", "name": "L4", "memory_bytes": 2**34} for i in range(4)]
    devices_sync(hosts[0], make_facts(gpus=gpus))
    jobs = [
        job_submit(job=make_job(team, alice, hosts[0], devices_per_host=2), by="alice")
        for _ in range(2)
    ]

    found = [gang_of(job.current_attempt) for job in jobs]

    assert [(place.master_port, place.num_processes) for place in found] == [
        (29400, 2),
        (29401, 2),
    ]
    assert {place.master_address for place in found} == {"127.0.0.1"}


def test_a_port_is_one_gangs_until_it_has_ended(team, alice, hosts):
    leader, other = members(make_gang(team, alice, hosts))
    with pytest.raises(IntegrityError), transaction.atomic():
        Attempt.objects.filter(pk=other.pk).update(host=leader.host, master_port=29400)
    Attempt.objects.filter(job=leader.job).update(ended_at="2026-01-01T00:00Z")
    assert free_port(hosts[0]) == 29400


def test_a_port_that_is_taken_on_the_host_is_replaced_before_the_claim_holds(team, alice, hosts):
    leader = members(make_gang(team, alice, hosts))[0]
    reply = reply_to(leader, kind=True, ports=False)
    leader.refresh_from_db()
    assert (reply.may_start, reply.request.gang.master_port) == (False, 29401)
    assert (leader.claimed_at, leader.taken_ports) == (None, [29400])


def test_every_port_taken_sends_the_job_back(team, alice, hosts):
    facts = hosts[0].facts | {"last_gang_port": 29400}
    Host.objects.filter(pk=hosts[0].pk).update(facts=facts)
    job = make_gang(team, alice, hosts)
    with pytest.raises(Exception, match="given back"):
        reply_to(members(job)[0], ports=False)
    job.refresh_from_db()
    assert (job.state, job.reason) == ("queued", "preflight_failed")


def test_a_host_that_waits_for_the_others_is_asked_again_and_not_given_back(team, alice, hosts):
    leader, other = members(make_gang(team, alice, hosts))
    assert reply_to(leader, memory=True).may_start is False
    assert reply_to(leader, memory=False).may_start is False
    claim(other)
    assert reply_to(leader, memory=False).may_start is True


def test_one_host_that_is_not_fit_gives_back_every_part(team, alice, hosts):
    job = make_gang(team, alice, hosts)
    leader, other = members(job)
    claim(leader, "folder")
    with pytest.raises(Exception, match="given back"):
        reply_to(other, memory=False)
    with pytest.raises(Exception, match="withdrawn"):
        reply_to(leader)
    assert Attempt.objects.filter(job=job, ended_at=None).count() == 0


def test_a_job_of_one_process_has_no_place(attempt):
    assert gang_of(attempt) is None


def test_a_started_gang_still_gets_its_answer_when_the_reply_was_lost(team, alice, hosts):
    leader = start(make_gang(team, alice, hosts))[0]
    assert attempt_claim(
        attempt_id=leader.pk,
        host=leader.host,
        request=claim_request(leader).model_copy(update={"claim_id": "folder-0"}),
    ).may_start


# The host's own look: what it is asked to find, and where its answer leads.


FIT = PreflightCheck(name="disk", ok=True, sentence="50.0 GiB of disk are free.")
UNFIT = PreflightCheck(
    name="memory",
    ok=False,
    sentence="1.00 GiB of memory are available; the job needs 4.00.",
    remedy="Free 3.00 GiB there.",
    figures={"available_bytes": 1.0 * GIB},
)


def refuse(job: Job, **changes) -> None:
    """Have the job's host find itself unfit and give the attempt back."""
    attempt = Attempt.objects.get(pk=Job.objects.get(pk=job.pk).current_attempt_id)
    with pytest.raises(ConflictProblem, match="given back"):
        claim(attempt, **{"checks": (FIT, UNFIT), **changes})
    job.refresh_from_db()


def try_again(job: Job) -> None:
    """Let the rest of a failed try pass, and give the host its turn."""
    Event.objects.filter(subject=job.pk).update(at=now() - timedelta(minutes=1))
    allocate_pool(job.pool)
    job.refresh_from_db()


def test_a_beat_brings_home_what_the_attempt_needs(job, host):
    Job.objects.update(prediction={"peak_memory_bytes": {"value": 3 * GIB, "low": 2 * GIB}})
    (wanted,) = host_beat(host=host, beat=make_beat()).wanted
    assert (wanted.needs.kind, wanted.needs.memory_bytes) == ("train", 2 * GIB)


def test_model_cache_attention_compiler_and_environment_are_among_the_needs(team, alice, host):
    model = FolderModel(path="llama")
    llama = {"model": model, "engine": "llamacpp"}
    sizes = {"max_length": 2048, "max_concurrency": 4}
    taught = {"model": FolderModel(path="student"), "teacher": model}
    for spec, needed in (
        (
            BenchmarkSpec(model=model, weight_dtype="int8"),
            {"model": model, "weight_dtype": "int8"},
        ),
        (ServeSpec(**llama, **sizes), {"context_tokens": 8192}),
        (ServeSpec(**llama, max_length=2048, kv_cache_tokens=6000), {"context_tokens": 6000}),
        (ServeSpec(**llama), {"context_tokens": 0, "environment": "llamacpp"}),
        (ServeSpec(model=model, max_length=2048), {"context_tokens": 0}),
        (
            TrainSpec(
                **taught,
                objective="distillation",
                engine="trl",
                beta=1.0,
                temperature=1.0,
                data=FileData(path="a.jsonl"),
                max_completion_length=64,
            ),
            taught,
        ),
        (TrainSpec(attention="flex"), {"attention": "flex", "compiles": True}),
        (TrainSpec(attention="flash"), {"attention": "flash", "compiles": False}),
    ):
        with undone(spec):
            job = job_submit(job=make_job(team, alice, host, spec=spec), by="alice")
            needs = needs_of(job.current_attempt)
            assert {name: getattr(needs, name) for name in needed} == needed


def test_what_a_fit_host_found_stands_in_the_event_of_the_start(job):
    claim(job.current_attempt, checks=(FIT,))
    event = Event.objects.get(subject=job.pk, to_state="starting")
    assert event.detail["checks"][0]["sentence"] == FIT.sentence


def test_a_host_that_is_not_fit_gives_the_job_back_once_with_every_check(job):
    first, queued_at = job.current_attempt, job.queued_at
    refuse(job)
    event = Event.objects.filter(subject=job.pk).last()
    assert (job.state, event.reason, event.actor) == ("queued", "preflight_failed", "host:box")
    assert [check["ok"] for check in event.detail["checks"]] == [True, False]
    assert event.detail["checks"][1]["figures"] == {"available_bytes": 1.0 * GIB}
    assert job.queued_at == queued_at
    assert UNFIT.sentence in waiting_sentence(job)
    assert FIT.sentence not in waiting_sentence(job)
    for checks in ({}, {"checks": (UNFIT,)}):
        with pytest.raises(ConflictProblem):
            claim(first, **checks)
    assert Event.objects.filter(subject=job.pk, reason="preflight_failed").count() == 1
    assert Attempt.objects.get(pk=first.pk).ended_at is not None
    assert Command.objects.get(attempt=first).state == "dead"


def test_each_try_is_an_attempt_of_its_own_and_the_third_unfit_one_ends_the_job(job):
    seen = {job.current_attempt_id}
    for _ in range(2):
        refuse(job)
        try_again(job)
        assert job.state == "preflight"
        seen.add(job.current_attempt_id)
    refuse(job)
    assert (job.state, job.reason) == ("error", "preflight_failed")
    assert len(seen) == 3


def test_a_wrong_fence_gives_nothing_back(job):
    refuse(job, fence="0" * 32)
    assert job.state == "preflight"


def test_a_claimed_attempt_cannot_be_given_back(attempt):
    refuse(attempt.job)
    assert attempt.job.state == "starting"


def test_a_check_that_no_database_should_keep_is_refused():
    for check in [
        {"sentence": "x" * 601},
        {"sentence": "a\0b"},
        {"sentence": "", "figures": {"free_bytes": float("nan")}},
        {"sentence": "", "figures": {f"f{number}": 1.0 for number in range(17)}},
    ]:
        with pytest.raises(ValidationError):
            PreflightCheck.model_validate({"name": "memory", "ok": True, **check})
