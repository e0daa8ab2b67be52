"""Services for jobs: create, submit, stop, clone and delete (abandoning: giving_up.py)."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.db import IntegrityError, transaction

from runners.jobspec import DrillSpec, JobSpec
from runners.reasons import Reason
from webapp.accounts.models import Team
from webapp.accounts.secrets import secret_names
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, InvalidProblem
from webapp.hosts.models import RUNS_JOBS, Host, HostState, Pool
from webapp.jobs.allocation import allocate_after, allocate_pool
from webapp.jobs.gangs import members_of, order_stop, release_unstarted
from webapp.jobs.holding import pool_lock
from webapp.jobs.models import FINAL_STATES, Attempt, Job, JobState, Priority
from webapp.jobs.retries import check_retries
from webapp.jobs.transitions import transition
from webapp.plans.models import Plan
from webapp.queue.quotas import check_submit, duration_within, quota_of

NAME_LENGTH = 120


def job_create(  # noqa: PLR0913 (keyword-only: each is a column that the caller decides)
    *,
    team: Team,
    owner: User,
    spec: JobSpec,
    name: str,
    model_name: str,
    host: Host | None = None,
    pool: Pool | None = None,
    num_hosts: int = 1,
    devices_per_host: int | None = None,
    priority: int = Priority.NORMAL,
    plan: Plan | None = None,
    estimate: Mapping[str, Any] | None = None,
    prediction: Mapping[str, Any] | None = None,
    idempotency_key: str | None = None,
    max_duration_seconds: float | None = None,
    max_retries: int = 0,
) -> Job:
    """Return a new draft job, or the job created earlier with the same key.

    It runs on ``host``, or on any host of ``pool`` if no host is given.

    Raises:
        InvalidProblem: neither is given; the host belongs to another team, is retired or only
            planned for; or it is a drill and this server allows none.
        ConflictProblem: another team used the key.
    """
    if existing := _job_with_key(team, idempotency_key):
        return existing
    _check_kind(spec)
    _check_secrets(team, spec)
    check_retries(max_retries)
    if host is not None:
        _check_host(team, host)
    place = host.pool if host is not None else pool
    if place is None or not _may_launch(team, place):
        raise InvalidProblem("no_place", "Name a host or a pool of your team for the job.")
    job = Job(
        team=team,
        owner=owner,
        pool=place,
        requested_host=host,
        num_hosts=num_hosts,
        devices_per_host=devices_per_host,
        priority=priority,
        kind=spec.kind,
        spec=spec.model_dump(mode="json"),
        name=name[:NAME_LENGTH],
        model_name=model_name[:NAME_LENGTH],
        plan=plan,
        plan_request=plan.request if plan else {},
        estimate=dict(estimate or {}),
        prediction=dict(prediction or {}),
        idempotency_key=idempotency_key,
        max_duration_seconds=max_duration_seconds,
        max_retries=max_retries,
    )
    return _store_once(job)


def _job_with_key(team: Team, key: str | None) -> Job | None:
    """Return the team's job that was created with a key."""
    return Job.objects.filter(team=team, idempotency_key=key).first() if key else None


def _store_once(job: Job) -> Job:
    """Store a new job; if its key exists by now, return the existing job."""
    try:
        with transaction.atomic():
            job.save(force_insert=True)
    except IntegrityError:
        if job.idempotency_key is None:
            raise
        if existing := _job_with_key(job.team, job.idempotency_key):
            return existing
        raise ConflictProblem(
            "key_taken", "This launch was used before. Open the plan's review and launch again."
        ) from None
    return job


def _may_launch(team: Team, pool: Pool) -> bool:
    return pool.team_id == team.pk or pool.shared_with.filter(pk=team.pk).exists()


def _check_host(team: Team, host: Host) -> None:
    if not _may_launch(team, host.pool):
        raise InvalidProblem("unknown_host", "This host belongs to another team; choose your own.")
    if host.kind not in RUNS_JOBS:
        raise InvalidProblem(
            "virtual_host", f"{host.name} is only planned for. Enrol a machine to run jobs."
        )
    if host.state == HostState.RETIRED:
        raise InvalidProblem("retired_host", f"{host.name} is retired; choose another host.")


def _check_kind(spec: JobSpec) -> None:
    if isinstance(spec, DrillSpec) and not settings.ALLOWS_DRILLS:
        raise InvalidProblem(
            "drills_off",
            "This server runs no drills. Its operator allows them with SLIPWAY_DRILLS=1.",
        )


def _check_secrets(team: Team, spec: JobSpec) -> None:
    if unknown := sorted(set(spec.secrets) - set(secret_names(team))):
        raise InvalidProblem(
            "unknown_secret",
            f"{team.name} has no secret {', '.join(unknown)}. Store it under Secrets first.",
        )


def job_submit(*, job: Job, by: str) -> Job:
    """Queue a draft job, and start it at once if devices are free.

    Submitting twice changes nothing. ``by`` is the user's name.

    Raises:
        Problem: the team's quota does not allow it.
    """
    with transaction.atomic():
        pool_lock(f"user {job.owner_id}")
        if job.state == JobState.DRAFT:
            check_submit(job)
        if not transition(job, JobState.QUEUED, actor=by, source=JobState.DRAFT):
            return job
        limit = duration_within(job, quota_of(job.team))
        Job.objects.filter(pk=job.pk).update(max_duration_seconds=limit)
    allocate_pool(job.pool)
    job.refresh_from_db()
    return job


def job_stop(*, job: Job, by: str, reason: Reason = Reason.STOPPED_BY_USER) -> Job:
    """End a job: at once if no host claimed it yet, else through its supervisor.

    Raises:
        ConflictProblem: the job has already ended or was never submitted.
    """
    with transaction.atomic():
        job = Job.objects.select_for_update().get(pk=job.pk)
        if job.state in FINAL_STATES or job.state == JobState.DRAFT:
            raise ConflictProblem(
                "not_stoppable", f"{job.name} is {job.get_state_display().lower()}; nothing runs."
            )
        attempt = job.current_attempt
        if attempt is None or job.state in {JobState.QUEUED, JobState.PREFLIGHT}:
            _end_before_start(job, by, reason)
        elif job.state != JobState.STOPPING:
            _order_stop(job, attempt, by, reason)
    if attempt is None:
        allocate_pool(job.pool)
    else:
        allocate_after(attempt)
    job.refresh_from_db()
    return job


def _end_before_start(job: Job, by: str, reason: Reason) -> None:
    attempt = job.current_attempt
    if transition(job, JobState.STOPPED, actor=by, attempt=attempt, reason=reason) and attempt:
        Attempt.objects.filter(pk=attempt.pk).update(stop_reason=reason)
        release_unstarted(attempt)


def _order_stop(job: Job, attempt: Attempt, by: str, reason: Reason) -> None:
    if transition(job, JobState.STOPPING, actor=by, attempt=attempt, reason=reason):
        order_stop(members_of(attempt), reason)


def job_clone(*, job: Job, owner: User) -> Job:
    """Return a draft copy of ``job`` owned by ``owner``."""
    return Job.objects.create(
        team=job.team,
        owner=owner,
        pool=job.pool,
        requested_host=job.requested_host,
        num_hosts=job.num_hosts,
        devices_per_host=job.devices_per_host,
        kind=job.kind,
        spec=job.spec,
        name=_clone_name(job.name),
        model_name=job.model_name,
        plan=job.plan,
        plan_request=job.plan_request,
        estimate=job.estimate,
        prediction=job.prediction,
        max_duration_seconds=job.max_duration_seconds,
        max_retries=job.max_retries,
    )


def _clone_name(name: str) -> str:
    suffix = " (copy)"
    return name if name.endswith(suffix) else name[: NAME_LENGTH - len(suffix)] + suffix


def job_delete(*, job: Job) -> None:
    """Hide a job from lists; its measurements still calibrate its host.

    Raises:
        ConflictProblem: the job has not ended.
    """
    rows = Job.objects.filter(pk=job.pk, state__in=[*FINAL_STATES, JobState.DRAFT])
    if not rows.update(deleted_at=now()):
        raise ConflictProblem(
            "still_live", f"{job.name} is {job.get_state_display().lower()}; stop it first."
        )


def queue_expire(*, older_than: timedelta) -> int:
    """End jobs that were queued for longer than ``older_than``; return how many."""
    late = Job.objects.filter(state=JobState.QUEUED, queued_at__lt=now() - older_than)
    return sum(
        transition(
            job,
            JobState.EXPIRED,
            actor="system:ticker",
            attempt=job.current_attempt,
            reason=Reason.QUEUE_TIMEOUT,
        )
        for job in late.select_related("current_attempt")
    )
