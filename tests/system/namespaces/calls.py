"""What the namespace tests ask the product's services and its database, in a desk's process."""

from typing import Any

from django.contrib.auth.models import User

from runners.jobspec import TrainSpec
from tests.system.faults.calls import token
from webapp.audit.models import Event
from webapp.hosts.models import Host, HostState, Pool
from webapp.hosts.services import contact_of
from webapp.jobs.models import FINAL_STATES, Allocation, Attempt, Job
from webapp.jobs.services import job_create, job_resume, job_stop, job_submit

BY = "alice"
MEASURED = {
    "measured_at_ms": 1, "duration_seconds": 1.0, "torch_version": "2.13.0", "num_threads": 1,
    "devices": [], "disk_write_bytes_per_second": 1e8,
}  # fmt: skip


def all_measured() -> None:
    """Let every host be ready without the minute that measuring it takes."""
    Host.objects.update(microbench=MEASURED, state=HostState.READY)


def train_together(spec: dict[str, Any], num_hosts: int) -> str:
    """Launch one training over some hosts of the pool and return its job's id."""
    pool = Pool.objects.get()
    job = job_create(
        team=pool.team, owner=User.objects.get(username=BY), pool=pool, num_hosts=num_hosts,
        name="Train together", model_name="demo", spec=TrainSpec.model_validate(spec),
    )  # fmt: skip
    return job_submit(job=job, by=BY).pk


def stop(job: str) -> None:
    """Stop a job as its owner does."""
    job_stop(job=Job.objects.get(pk=job), by=BY)


def resume(job: str, num_hosts: int | None = None) -> str:
    """Resume a job as its owner does, on as many hosts or on some, and return the new one's id."""
    owner = User.objects.get(username=BY)
    draft = job_resume(job=Job.objects.get(pk=job), owner=owner, num_hosts=num_hosts)
    return job_submit(job=draft, by=BY).pk


def told(job: str) -> dict[str, Any]:
    """Return what the server knows of a job."""
    row = Job.objects.get(pk=job)
    members = list(Attempt.objects.filter(job=row).order_by("number", "node_rank"))
    events = Event.objects.filter(subject=row.pk)
    return {
        "state": row.state,
        "reason": row.reason,
        "progress": row.progress_done,
        "result": row.result,
        "attempts": max((each.number for each in members), default=0),
        "members": {each.host.name: each.exit_record.get("reason", "") for each in members},
        "contact": {each.host.name: contact_of(each.host) for each in members},
        "held": Allocation.objects.filter(released_at=None).count(),
        "ends": events.filter(kind="job.state", to_state__in=FINAL_STATES).count(),
        "sentences": [each.detail.get("sentence", "") for each in events],
    }


def everything() -> dict[str, Any]:
    """Return the states of all jobs, attempts and hosts, for the words of a failure."""
    hosts = Host.objects.values_list("name", "state", "last_seen_at")
    return {
        "jobs": list(Job.objects.values_list("pk", "state", "reason")),
        "attempts": list(
            Attempt.objects.values_list("job", "host__name", "stop_reason", "exit_record")
        ),
        "hosts": [(name, state, str(seen)) for name, state, seen in hosts],
    }


CALLS = {
    call.__name__: call
    for call in (token, all_measured, train_together, stop, resume, told, everything)
}
