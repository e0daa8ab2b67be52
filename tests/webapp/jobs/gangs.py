"""Jobs on several hosts for the tests: a pool of hosts that report, and their job."""

from datetime import timedelta

from django.contrib.auth.models import User

from runners.jobspec import DataParallel, TrainSpec
from runners.shared.messages import ExitRecord
from tests.webapp.conftest import EXIT_OK, STARTED, batch_of, claim, enrol, make_beat, make_facts
from webapp.accounts.models import Team
from webapp.agents.heartbeats import host_beat
from webapp.agents.ingest import events_accept
from webapp.core.clock import now
from webapp.hosts.models import Host
from webapp.jobs.gangs import members_of
from webapp.jobs.models import Attempt, Job
from webapp.jobs.services import job_create, job_submit


def make_hosts(team: Team, count: int, first: int = 1) -> list[Host]:
    """Return hosts that are ready, each with an address of its own: 10.0.0.1, 10.0.0.2, ..."""
    hosts = []
    for number in range(first, first + count):
        host, _ = enrol(team, name=f"Box {number}")
        host_beat(host=host, beat=make_beat(facts=make_facts(addresses=(f"10.0.0.{number}",))))
        Host.objects.filter(pk=host.pk).update(state="ready")
        host.refresh_from_db()
        hosts.append(host)
    return hosts


def make_gang(
    team: Team, owner: User, hosts: list[Host], retries: int = 0, **parallel: object
) -> Job:
    """Return a submitted job over all the hosts, which none has claimed."""
    spec = TrainSpec(parallel=DataParallel(**parallel), gradient_accumulation_steps=4)
    job = job_create(
        team=team, owner=owner, pool=hosts[0].pool, num_hosts=len(hosts), spec=spec,
        name="Train together", model_name="demo", max_retries=retries,
    )  # fmt: skip
    return job_submit(job=job, by="alice")


def members(job: Job) -> list[Attempt]:
    """Return the job's attempts on its hosts, the leader first."""
    job.refresh_from_db()
    assert job.current_attempt is not None
    return members_of(job.current_attempt)


def start(job: Job) -> list[Attempt]:
    """Have every host claim and start its part; return the parts."""
    for member in members(job):
        claim(member, f"folder-{member.node_rank}")
    for member in members(job):
        tell(member, ("started", STARTED))
    return members(job)


def tell(member: Attempt, *events: tuple[str, dict]) -> None:
    """Have a host report what happened next to its part."""
    member.refresh_from_db()
    batch = batch_of(member, *events, first=member.acked_seq + 1)
    events_accept(host=member.host, batch=batch)


def end(member: Attempt, reason: str = "ok", at_ms: int = 2) -> None:
    """Have a host report how its part ended."""
    code = 0 if reason == "ok" else 1
    record = EXIT_OK | {"reason": reason, "exit_code": code, "ended_at_ms": at_ms}
    tell(member, ("exited", ExitRecord(**record).model_dump(mode="json")))


def silence(host: Host, minutes: float = 30) -> None:
    """Let a host have been silent for so long."""
    Host.objects.filter(pk=host.pk).update(last_seen_at=now() - timedelta(minutes=minutes))
