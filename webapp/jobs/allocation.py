"""Who gets which devices next: the first queued job of a pool for which there is room.

Runs at submit, at every end of a job, at every beat and from the ticker; being called once too
often changes nothing.
"""

import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import F, Max, Q

from runners.reasons import Reason
from runners.timing import scaled
from webapp.core.clock import now
from webapp.hosts.contact import Contact, contact_of
from webapp.hosts.models import Device, Host, HostState, Pool
from webapp.jobs.holding import devices_release, devices_take, held_devices, pool_lock
from webapp.jobs.models import Attempt, Command, Event, Job, JobState
from webapp.jobs.preflight import Check, run_checks
from webapp.jobs.transitions import transition

ACTOR = "system:allocator"
MAX_PREFLIGHTS = 3
PREFLIGHT_RETRY = timedelta(seconds=scaled(30, least=1))

Gang = Sequence[tuple[Host, Sequence[Device]]]  # the leader first
Room = dict[Host, list[Device]]


def allocate_pool(pool: Pool) -> list[Job]:
    """Give the pool's free devices to its queued jobs; return the jobs that got some."""
    with transaction.atomic():
        pool_lock(pool.pk)
        jobs = _waiting(pool)
        if not jobs:
            return []
        room = _room(pool)
        taken = []
        for job in jobs:
            gang = _place(job, room)
            if gang and _may_try(job) and _take(job, gang):
                taken.append(job)
                for host, devices in gang:
                    room[host] = [one for one in room[host] if one not in devices]
    return taken


def _waiting(pool: Pool) -> list[Job]:
    queued = Job.objects.filter(pool=pool, state=JobState.QUEUED, deleted_at=None)
    return list(
        queued.order_by("-priority", F("queue_rank").asc(nulls_last=True), "queued_at", "pk")
    )


def _room(pool: Pool) -> Room:
    """Return the free devices of every host that may take new work now."""
    held = held_devices([pool])
    devices: dict[str, list[Device]] = defaultdict(list)
    for device in Device.objects.filter(host__pool=pool, is_present=True, cordoned_at=None):
        if device.pk not in held:
            devices[device.host_id].append(device)
    hosts = Host.objects.filter(pool=pool, state=HostState.READY).order_by("pk")
    return {host: devices[host.pk] for host in hosts if contact_of(host) is Contact.LIVE}


def _place(job: Job, room: Room) -> Gang | None:
    """Return devices for the whole gang, or None."""
    parts = []
    for host, free in room.items():
        if job.requested_host_id not in {None, host.pk}:
            continue
        wanted = job.devices_per_host or _num_devices(host)
        if wanted and len(free) >= wanted:
            parts.append((host, free[:wanted]))
    return parts[: job.num_hosts] if len(parts) >= job.num_hosts else None


def _num_devices(host: Host) -> int:
    return Device.objects.filter(host=host, is_present=True, cordoned_at=None).count()


def _failed_preflights(job: Job) -> list[Event]:
    events = Event.objects.filter(
        kind="job.state", subject=job.pk, from_state=JobState.PREFLIGHT, to_state=JobState.QUEUED
    )
    return list(events.order_by("-id"))


def _may_try(job: Job) -> bool:
    failed = _failed_preflights(job)
    return not failed or failed[0].at + PREFLIGHT_RETRY <= now()


def _take(job: Job, gang: Gang) -> bool:
    """Give the job its devices and ring their hosts, or send it back with the failed checks."""
    checks = [check for host, _ in gang for check in run_checks(job, host)]
    failed = [check for check in checks if not check.is_ok]
    if failed:
        transition(job, JobState.PREFLIGHT, actor=ACTOR, detail=_detail(checks))
        send_back(job, _detail(failed)["checks"])
        return False
    members = attempts_make(job=job, gang=gang)
    for attempt, (_, devices) in zip(members, gang, strict=True):
        devices_take(attempt=attempt, devices=devices)
        Command.objects.create(host=attempt.host, kind="start", attempt=attempt, next_at=now())
    return transition(
        job, JobState.PREFLIGHT, actor=ACTOR, attempt=members[0], detail=_detail(checks)
    )


def attempts_make(*, job: Job, gang: Gang) -> list[Attempt]:
    """Make the job's next attempt, a row with a fence of its own for each host."""
    last = job.attempts.aggregate(last=Max("number"))["last"] or 0
    members: list[Attempt] = []
    for rank, (host, _) in enumerate(gang):
        attempt = Attempt.objects.create(
            job=job,
            number=last + 1,
            node_rank=rank,
            leader=members[0] if members else None,
            host=host,
            fence=secrets.token_hex(16),
        )
        members.append(attempt)
    job.host, job.current_attempt = members[0].host, members[0]
    job.save(update_fields=["host", "current_attempt"])
    return members


def send_back(
    job: Job,
    failed: Sequence[Mapping[str, Any]],
    *,
    attempt: Attempt | None = None,
    actor: str = ACTOR,
) -> bool:
    """Queue a job again whose hosts are not fit for it, or end it after the third time.

    ``attempt`` is the leader of those that are given back, where they were made already.
    """
    is_last = len(_failed_preflights(job)) + 1 >= MAX_PREFLIGHTS
    with transaction.atomic():
        moved = transition(
            job,
            JobState.ERROR if is_last else JobState.QUEUED,
            actor=actor,
            attempt=attempt,
            reason=Reason.PREFLIGHT_FAILED,
            detail={"checks": list(failed)},
        )
        if moved and attempt is not None:
            _withdraw(attempt)
        if moved and not is_last:
            job.host, job.current_attempt = None, None
            job.save(update_fields=["host", "current_attempt"])
    return moved


def _withdraw(leader: Attempt) -> None:
    """End a gang's attempts that nobody claimed; those that run are told to stop."""
    for attempt in Attempt.objects.filter(Q(pk=leader.pk) | Q(leader=leader)):
        Command.objects.filter(attempt=attempt).exclude(state="acked").update(state="dead")
        if attempt.claimed_at is None:
            Attempt.objects.filter(pk=attempt.pk).update(ended_at=now())
            devices_release(attempt)
        else:
            Attempt.objects.filter(pk=attempt.pk).update(
                stop_reason=Reason.SUPERSEDED, stop_requested_at=now()
            )
            Command.objects.create(host=attempt.host, kind="stop", attempt=attempt, next_at=now())


def _detail(checks: Sequence[Check]) -> dict[str, list[dict[str, Any]]]:
    return {"checks": [check.as_detail() for check in checks]}
