"""What the desk can be asked: services of the product, and what its database holds.

Imported after ``django.setup()``, in the desk's own process.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.db import connection, connections

from runners.host.app import sign
from runners.jobspec import DrillSpec, TrainSpec
from runners.shared.messages import Doorbell
from runners.shared.redis_address import key_prefix
from tests.stack import PASSWORD
from tests.system.faults import laws
from tests.webapp.conftest import make_microbench
from webapp.accounts.models import Membership, Role, Team
from webapp.agents.dispatch import Publisher, ring
from webapp.audit.models import Event
from webapp.hosts.models import Host, HostState
from webapp.hosts.services import command_key, contact_of, credential_revoke, token_create
from webapp.jobs.models import FINAL_STATES, Attempt, AttemptEvent, Command, Job, JobState
from webapp.jobs.services import job_abandon, job_create, job_stop, job_submit
from webapp.live.stream import ticket_for
from webapp.metrics.store import read_raw

BY = "olga"
Answer = Any


def people() -> Answer:
    """Make the operator in whose name everything is done."""
    team = Team.objects.order_by("created_at").first()
    olga, _ = User.objects.get_or_create(username=BY)
    olga.set_password(PASSWORD)
    olga.save()
    Membership.objects.get_or_create(user=olga, team=team, defaults={"role": Role.OPERATOR})


def token(name: str) -> Answer:
    """Return the text of an enrolment token."""
    team = Team.objects.order_by("created_at").first()
    return token_create(team=team, by=None, name=name)[1]


def measured(slug: str) -> Answer:
    """Let a host be ready without the minute that measuring it takes."""
    bench = make_microbench().model_dump(mode="json")
    Host.objects.filter(slug=slug).update(microbench=bench, state=HostState.READY)


def submit(slug: str, spec: dict[str, Any], max_duration: float | None = None) -> Answer:
    """Launch a drill and return its job's id."""
    on = Host.objects.get(slug=slug)
    owner = User.objects.get(username=BY)
    job = job_create(
        team=on.team, owner=owner, host=on, spec=DrillSpec(**spec), name="Drill", model_name="",
        max_duration_seconds=max_duration,
    )  # fmt: skip
    return job_submit(job=job, by=BY).pk


def train(slug: str, spec: dict[str, Any], retries: int) -> Answer:
    """Launch a training that may be tried again, and return its job's id."""
    on = Host.objects.get(slug=slug)
    job = job_create(
        team=on.team, owner=User.objects.get(username=BY), host=on,
        spec=TrainSpec.model_validate(spec), name="Training", model_name="demo",
        max_retries=retries,
    )  # fmt: skip
    return job_submit(job=job, by=BY).pk


def figures(job: str) -> Answer:
    """Return what a training said: its notes, and of each step the rate and the loss."""
    row, steps = Job.objects.get(pk=job), []
    for attempt in Attempt.objects.filter(job=row).order_by("number"):
        rates, losses = (read_raw(attempt.pk, "job", name) for name in ("learning_rate", "loss"))
        steps += zip(rates.value.tolist(), losses.value.tolist(), strict=True)
    return {"notes": row.result.get("notes", {}), "steps": steps}


def stop(job: str) -> Answer:
    """Stop a job as its owner would."""
    return job_stop(job=Job.objects.get(pk=job), by=BY).state


def abandon(job: str) -> Answer:
    """End a silent host's job on a person's word."""
    row = Job.objects.get(pk=job)
    return job_abandon(job=row, by=BY, typed_host_name=row.host.name).state


def revoke(slug: str) -> Answer:
    """Lock a host out."""
    credential_revoke(host=Host.objects.get(slug=slug), by=BY)


def view(job: str) -> Answer:
    """Return what the database holds of a job."""
    row = Job.objects.get(pk=job)
    events = Event.objects.filter(kind="job.state", subject=job).order_by("id")
    return {
        "state": row.state,
        "reason": row.reason,
        "num_steps": row.progress_done,
        "states": [event.to_state for event in events],
        "attempts": [
            _attempt(each) for each in Attempt.objects.filter(job=row).order_by("number")
        ],
    }


def _attempt(attempt: Attempt) -> Answer:
    kinds = list(AttemptEvent.objects.filter(attempt=attempt).values_list("kind", flat=True))
    return {
        "id": attempt.pk,
        "host": attempt.host.slug,
        "fence": attempt.fence,
        "is_claimed": attempt.claimed_at is not None,
        "is_ended": attempt.ended_at is not None,
        "acked_seq": attempt.acked_seq,
        "duplicates": attempt.dropped_duplicates,
        "gaps": attempt.refused_gaps,
        "exit": attempt.exit_record,
        "num_started": kinds.count("started"),
        "num_exited": kinds.count("exited"),
    }


def states() -> Answer:
    """Return how many jobs are in each state."""
    counted: dict[str, int] = {}
    for state in Job.objects.values_list("state", flat=True):
        counted[state] = counted.get(state, 0) + 1
    return counted


def open_jobs(slugs: list[str]) -> Answer:
    """Return the jobs of some hosts that have not ended."""
    over = [*FINAL_STATES, JobState.DRAFT]
    open_ones = Job.objects.filter(requested_host__slug__in=slugs).exclude(state__in=over)
    return list(open_ones.values_list("pk", flat=True))


def host(slug: str) -> Answer:
    """Return what the server knows of a host."""
    row = Host.objects.get(slug=slug)
    problems = row.last_beat.get("problems", [])
    return {
        "id": row.pk,
        "contact": str(contact_of(row)),
        "announced": row.contact,
        "state": row.state,
        "clock_offset_ms": row.clock_offset_ms,
        "problems": list(problems),
    }


def contacts_of(slug: str) -> Answer:
    """Return the changes of contact that were announced for a host, in order."""
    row = Host.objects.get(slug=slug)
    events = Event.objects.filter(kind="host.contact", subject=row.pk).order_by("id")
    return list(events.values_list("to_state", flat=True))


def ring_again(job: str, times: int) -> Answer:
    """Deliver a job's start doorbell several times, each freshly signed."""
    attempt = Job.objects.get(pk=job).current_attempt
    body = Doorbell(command_id="again", kind="start", attempt_id=attempt.pk, fence=attempt.fence)
    for _ in range(times):
        ring(attempt.host, body)


def signed(slug: str, age_seconds: float = 0.0) -> Answer:
    """Return a genuine doorbell of a host, signed some time ago."""
    row = Host.objects.get(slug=slug)
    doorbell = Doorbell(command_id="test", kind="ping")
    return list(
        sign(doorbell, host_id=row.pk, key=command_key(row), now=time.time() - age_seconds)
    )


def publish(slug: str, body: str, mac: str) -> Answer:
    """Put a message into a host's queue as whoever can write there would."""
    row = Host.objects.get(slug=slug)
    Publisher().send(settings.REDIS_URL, key_prefix(row.pk), "runners.ping", [body, mac])


def submit_at_once(slug: str, key: str, times: int) -> Answer:
    """Launch with one idempotency key from several threads, and return every job that came out."""
    on = Host.objects.get(slug=slug)
    owner = User.objects.get(username=BY)
    gate = threading.Barrier(times)

    def launch() -> str:
        gate.wait()
        try:
            job = job_create(
                team=on.team, owner=owner, host=on, spec=DrillSpec(steps=2), name="Drill",
                model_name="", idempotency_key=key,
            )  # fmt: skip
            return job_submit(job=job, by=BY).pk
        finally:
            connections.close_all()

    with ThreadPoolExecutor(times) as pool:
        return [each.result() for each in [pool.submit(launch) for _ in range(times)]]


def sql(statement: str) -> Answer:
    """Run a statement on the installation's database."""
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return [list(row) for row in cursor.fetchall()] if cursor.description else []


def commands(job: str) -> Answer:
    """Return the doorbells of a job."""
    rows = Command.objects.filter(attempt__job=job).order_by("pk")
    return [[row.kind, row.state, row.tries] for row in rows]


def ticket(topics: list[str]) -> Answer:
    """Return what opens the live stream for some topics."""
    owner = Membership.objects.filter(role=Role.OPERATOR).first().user
    return ticket_for(owner, set(topics))


def broken() -> Answer:
    """Return the laws that do not hold."""
    return laws.broken_laws()


CALLS: dict[str, Callable[..., Answer]] = {
    call.__name__: call
    for call in (
        people, token, measured, submit, train, figures, stop, abandon, revoke, view, states, open_jobs, host, contacts_of,
        ring_again, signed, publish, submit_at_once, sql, commands, ticket, broken,
    )
}  # fmt: skip
