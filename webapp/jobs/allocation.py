"""Apply the decisions of the queue policy: create attempts, take devices, wake hosts.

Runs at submit, at every end of a job, at every heartbeat and from the ticker; a surplus call
changes nothing. Without a device that is free, or that queued jobs may share, it reads no queue,
and of a long queue only the first jobs while these take all that is free.
"""

import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from django.db import transaction
from django.db.models import Max, Q

from runners.shared.reasons import Reason
from webapp.core.clock import now
from webapp.hosts.epoch import is_restored
from webapp.hosts.models import Device, Host, Pool
from webapp.jobs.gangs import (
    Check,
    devices_release,
    devices_take,
    hardware_lock,
    meeting_address,
    places_reserve,
    pool_lock,
    run_checks,
)
from webapp.jobs.models import Attempt, Command, Job, JobState
from webapp.jobs.pool_state import (
    PoolState,
    first_candidates,
    held_elsewhere,
    least_shared_bytes,
    num_open_devices,
    pool_state_of,
    pools_sharing_devices,
    waiting_jobs,
)
from webapp.jobs.queue_decisions import Grant, grants_of
from webapp.jobs.quotas import Rules, failed_preflights
from webapp.jobs.transitions import transition

ACTOR = "system:allocator"
paused = threading.Event()  # set at shutdown: this process allocates nothing more
MAX_PREFLIGHTS = 3

Gang = Sequence[tuple[Host, Sequence[Device]]]  # the leader first


def allocate_pool(pool: Pool) -> list[Job]:
    """Allocate the pool's free devices to its queued jobs; return the jobs that received some."""
    if paused.is_set():
        return []
    with transaction.atomic():
        pool_lock(pool.pk)
        least_bytes = least_shared_bytes(pool)
        num_open = num_open_devices(pool, least_bytes)
        if not num_open or is_restored():
            return []
        jobs, turns = first_candidates(pool, num_open)
        if not jobs:
            return []
        # The quota counts a team's devices in all pools: every team of the queue is in ``jobs``.
        for team in sorted({job.team_id for job in jobs}):
            pool_lock(team)
        rules = Rules(jobs)
        picture = pool_state_of(pool, jobs, rules, least_bytes)
        grants = grants_of(picture.snapshot, turns)
        if grants is None:  # these leave devices free: the rest of the queue may use them
            jobs = waiting_jobs(pool)
            rules = Rules(jobs)
            picture = pool_state_of(pool, jobs, rules)
            grants = grants_of(picture.snapshot) or ()
        granted = [(picture.jobs[grant.job], _gang_of(grant, picture)) for grant in grants]
        hardware_lock(device for _, gang in granted for device in _devices(gang))
        return [
            job
            for job, gang in granted
            if is_free(gang) and may_take(rules, job, gang) and _start_attempts(job, gang)
        ]


def allocate_after(attempt: Attempt) -> None:
    """Allocate devices freed by an attempt: pools of other hosts on the same machine first."""
    for pool in [*pools_sharing_devices(attempt), attempt.job.pool]:
        allocate_pool(pool)


def is_free(gang: Gang) -> bool:
    """Return whether no device of a gang is held through another host of the same machine."""
    return not held_elsewhere(_devices(gang), {host.pk: host for host, _ in gang})


def _devices(gang: Gang) -> list[Device]:
    return [device for _, devices in gang for device in devices]


def may_take(rules: Rules, job: Job, gang: Gang) -> bool:
    """Return whether the job, now locked, is still queued and within its quota."""
    locked = Job.objects.select_for_update().filter(pk=job.pk, state=JobState.QUEUED).first()
    return locked is not None and rules.may_take(job, [each.pk for each in _devices(gang)])


def _gang_of(grant: Grant, picture: PoolState) -> Gang:
    return [
        (picture.hosts[host], [picture.devices[pk] for pk in devices])
        for host, devices in grant.places
    ]


def _start_attempts(job: Job, gang: Gang) -> bool:
    """Allocate the devices and wake their hosts; if preflight checks fail, requeue the job."""
    # torchrun's host order: addresses compared as text.
    gang = sorted(gang, key=lambda part: meeting_address(job, part[0]))
    checks = [check for host, devices in gang for check in run_checks(job, host, devices)]
    failed = [check for check in checks if not check.is_ok]
    if failed:
        transition(job, JobState.PREFLIGHT, actor=ACTOR, detail=_detail(checks))
        send_back(job, _detail(failed)["checks"])
        return False
    members = attempts_make(job=job, gang=gang)
    places_reserve(job=job, members=members)
    for attempt, (_, devices) in zip(members, gang, strict=True):
        devices_take(attempt=attempt, devices=devices)
        Command.objects.create(host=attempt.host, kind="start", attempt=attempt, next_at=now())
    return transition(
        job, JobState.PREFLIGHT, actor=ACTOR, attempt=members[0], detail=_detail(checks)
    )


def attempts_make(*, job: Job, gang: Gang) -> list[Attempt]:
    """Create the job's next attempt: one row per host, each with its own fence."""
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
    """Queue a job again after failed preflight checks, or end it after the third failure.

    ``attempt`` is the gang's leader, if attempts were already created.
    """
    is_last = len(failed_preflights([job])) + 1 >= MAX_PREFLIGHTS
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
            # None of the gang has started: not every host has claimed.
            for member in Attempt.objects.filter(Q(pk=attempt.pk) | Q(leader=attempt)):
                Command.objects.filter(attempt=member).exclude(state="acked").update(state="dead")
                Attempt.objects.filter(pk=member.pk).update(ended_at=now())
                devices_release(member)
        if moved and not is_last:
            job.host, job.current_attempt = None, None
            job.save(update_fields=["host", "current_attempt"])
    return moved


def _detail(checks: Sequence[Check]) -> dict[str, list[dict[str, Any]]]:
    return {"checks": [check.as_detail() for check in checks]}
