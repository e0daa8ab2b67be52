"""Services for jobs: create, submit, stop, clone, delete, abandon."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.conf import settings
from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from pydantic import ValidationError

from runners.jobspec import DrillSpec, JobSpec
from runners.jobspec.base import NAME_LENGTH
from runners.jobspec.train import LayoutOptions
from runners.shared.reasons import STOPPED, Reason
from webapp.accounts.models import Team
from webapp.accounts.secrets import secret_names
from webapp.audit.models import event_record
from webapp.core.clock import now
from webapp.core.display import counted, listed
from webapp.core.problems import ConflictProblem, InvalidProblem, Problem
from webapp.hosts.models import RUNS_JOBS, Device, Host, HostState, Pool
from webapp.hosts.services import Contact, contact_of
from webapp.jobs.allocation import allocate_after, allocate_pool
from webapp.jobs.budgets import budget_spend
from webapp.jobs.cached_models import uses_record
from webapp.jobs.gangs import devices_release, members_of, order_stop, pool_lock, release_unstarted
from webapp.jobs.models import (
    FINAL_STATES,
    LIVE_STATES,
    RESUMABLE_KINDS,
    Attempt,
    Job,
    JobState,
    Priority,
)
from webapp.jobs.quotas import check_submit, duration_within, quota_of
from webapp.jobs.reason_words import Words, words_for
from webapp.jobs.stored_files import ORDERS, files_release
from webapp.jobs.transitions import check_retries, transition
from webapp.plans.models import Plan

# Abandon a job on a person's order: the devices of its unreachable hosts count as free again.
#
# Nothing else frees an unreachable host's devices: its part may still run there, and is stopped
# when the host is back in contact. Parts on hosts in contact are stopped as usual.


GIVEN_UP = Reason.LOST_AND_ABANDONED_BY_USER


def open_parts(job: Job) -> list[Attempt]:
    """Return the parts of a job that have not ended and were not abandoned."""
    rows = Attempt.objects.filter(job=job, ended_at=None).exclude(stop_reason=GIVEN_UP)
    return list(rows.select_related("host", "job").order_by("number", "node_rank"))


def silent_parts(job: Job) -> list[Attempt]:
    """Return open parts on unreachable hosts; for an ended job, those that hold devices."""
    parts = [each for each in open_parts(job) if contact_of(each.host) is Contact.UNREACHABLE]
    return parts if job.state in LIVE_STATES else [each for each in parts if devices_of(each)]


def devices_of(part: Attempt) -> list[Device]:
    """Return the devices that a part holds."""
    devices = Device.objects.filter(allocations__attempt=part, allocations__released_at=None)
    return list(devices.order_by("index"))


def names_of(parts: Sequence[Attempt]) -> list[str]:
    """Return the distinct host names of the parts."""
    return list(dict.fromkeys(each.host.name for each in parts))


def job_abandon(*, job: Job, by: str, typed_host_name: str) -> Job:
    """Abandon a job with an unreachable host; the person confirms by typing the host's name.

    Names of several hosts are separated by commas. For a job that has already ended, only the
    devices of its unreachable hosts are freed.

    Raises:
        ConflictProblem: no host of the job is unreachable, or the job has ended.
        InvalidProblem: the typed name is not the host's.
    """
    silent = silent_parts(job)
    if not silent:
        raise ConflictProblem("host_in_contact", "The host answers; stop the job instead.")
    _check_typed(typed_host_name, names_of(silent))
    with transaction.atomic():
        if job.state in LIVE_STATES:
            _end(job, silent, by)
        else:
            event_record(
                job,
                "job.devices_freed",
                by,
                attempt_id=silent[0].pk,
                reason=GIVEN_UP,
                detail=_detail(silent),
            )
        for each in silent:
            Attempt.objects.filter(pk=each.pk).update(
                stop_reason=GIVEN_UP, stop_requested_at=now()
            )
            devices_release(each)
    return job


def _check_typed(typed: str, names: Sequence[str]) -> None:
    if {name.strip() for name in typed.split(",")} == set(names):
        return
    if len(names) == 1:
        raise InvalidProblem("wrong_name", f"Type the host's name, {names[0]}, to confirm.")
    raise InvalidProblem(
        "wrong_name", f"Type the names of all unreachable hosts to confirm: {', '.join(names)}."
    )


def _end(job: Job, silent: Sequence[Attempt], by: str) -> None:
    leader = job.current_attempt
    has_not_started = job.state == JobState.PREFLIGHT
    reachable = [each for each in open_parts(job) if each not in silent]
    moved = transition(
        job, JobState.STOPPED, actor=by, attempt=leader, reason=GIVEN_UP, detail=_detail(silent)
    )
    if not moved:
        raise ConflictProblem("not_stoppable", "The job has already ended.")
    if has_not_started and leader is not None and len(members_of(leader)) > 1:
        release_unstarted(leader)  # no host received the start signal
    else:
        order_stop(reachable, Reason.PEER_ENDED)


def _detail(silent: Sequence[Attempt]) -> dict[str, Any]:
    freed = {each.host.name: len(devices_of(each)) for each in silent}
    words = listed([f"{counted(count, 'device')} of {name}" for name, count in freed.items()])
    return {"hosts": list(freed), "freed": freed, "sentence": f"Counted as free: {words}."}


# The jobs at a site stop: ended with it, running elsewhere, or queued.


MOST_NAMED = 10


class Remaining(NamedTuple):
    """Jobs by outcome; a job on several hosts may be in two lists."""

    ended: list[str]  # by the site stop
    unreported: list[str]  # parts on this machine whose end is not stored yet
    elsewhere: list[str]  # parts on other hosts, which continue
    num_waiting: int


def remaining(own_host: str, since: datetime) -> Remaining:
    """Return the remaining jobs seen from one host; ``since`` is when the stop began."""
    ended = Job.objects.filter(reason=Reason.SITE_STOPPED, ended_at__gte=since).order_by("pk")
    claimed = Attempt.objects.filter(
        job__state__in=LIVE_STATES, claimed_at__isnull=False, ended_at=None
    )
    claimed = claimed.select_related("job", "host").order_by("job_id", "node_rank")
    waiting = Job.objects.filter(state=JobState.QUEUED, deleted_at=None).count()
    assigned = Job.objects.filter(state=JobState.PREFLIGHT).exclude(
        pk__in=[attempt.job_id for attempt in claimed]
    )
    return Remaining(
        [_name(job) for job in ended],
        [_name(each.job) for each in claimed if each.host_id == own_host],
        [f"{_name(each.job)} on {each.host}" for each in claimed if each.host_id != own_host],
        waiting + assigned.count(),
    )


def remaining_sentences(jobs: Remaining) -> list[str]:
    """Return the messages for the person who stops the site, one sentence per kind."""
    messages = []
    if jobs.ended:
        messages.append(f"Ended with Slipway: {_some(jobs.ended)}.")
    if jobs.unreported:
        messages.append(
            "Asked to stop; their pages show the end when Slipway is back: "
            f"{_some(jobs.unreported)}."
        )
    if jobs.elsewhere:
        messages.append(
            "Still running on other hosts, which report when Slipway runs again: "
            f"{_some(jobs.elsewhere)}."
        )
    if jobs.num_waiting:
        waiting = "1 job waits" if jobs.num_waiting == 1 else f"{jobs.num_waiting} jobs wait"
        messages.append(f"{waiting} in the queue until Slipway runs again.")
    return messages or ["No job was running or waiting."]


def _name(job: Job) -> str:
    return f"{job.name} ({job.pk})"


def _some(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return listed([*names[:MOST_NAMED], *([f"{more} more"] if more > 0 else [])])


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
    shared_bytes: int | None = None,
) -> Job:
    """Return a new draft job, or the job created earlier with the same key.

    It runs on ``host``, or on any host of ``pool`` if no host is given.

    Raises:
        InvalidProblem: neither host nor pool is given; the host belongs to another team, is
            retired or only planned for; or the job is a drill and this server allows no drills.
        ConflictProblem: another team used the key.
    """
    if existing := _job_with_key(team, idempotency_key):
        return existing
    if isinstance(spec, DrillSpec) and not settings.ALLOWS_DRILLS:
        raise InvalidProblem(
            "drills_off",
            "This server runs no drills. Its operator allows them with SLIPWAY_DRILLS=1.",
        )
    if unknown := sorted(set(spec.secrets) - set(secret_names(team))):
        raise InvalidProblem(
            "unknown_secret",
            f"{team.name} has no secret {', '.join(unknown)}. Store the secret under Secrets "
            "first.",
        )
    check_retries(max_retries)
    if host is not None:
        _check_host(team, host)
    place = host.pool if host is not None else pool
    if place is None or not _may_launch(team, place):
        raise InvalidProblem(
            "no_place", "No host or pool is given. Choose a host or pool of your team."
        )
    job = Job(
        team=team,
        owner=owner,
        pool=place,
        requested_host=host,
        num_hosts=num_hosts,
        devices_per_host=devices_per_host,
        shared_bytes=shared_bytes,
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
            "virtual_host",
            f"{host.name} is a planning-only host, so no job can run on it. Choose another "
            "host, or enrol the machine.",
        )
    if host.state == HostState.RETIRED:
        raise InvalidProblem("retired_host", f"{host.name} is retired; choose another host.")


def job_submit(*, job: Job, by: str) -> Job:
    """Queue a draft job, and start it at once if devices are free.

    Submitting twice changes nothing. ``by`` is the user's name. Every job starts here, so here
    it is held to its team's quota and to the budget of the token that asks for it; a draft that
    either refuses is deleted.

    Raises:
        Problem: the team's quota or the token's budget does not allow it.
    """
    try:
        with transaction.atomic():
            pool_lock(f"user {job.owner_id}")
            job.refresh_from_db(fields=["state"])  # a repeated launch may have submitted it
            if job.state == JobState.DRAFT:
                check_submit(job)
                job.max_duration_seconds = duration_within(job, quota_of(job.team))
                job.save(update_fields=["max_duration_seconds"])
                budget_spend(job)
                uses_record(job)
            if not transition(job, JobState.QUEUED, actor=by, source=JobState.DRAFT):
                return job
    except Problem:
        Job.objects.filter(pk=job.pk, state=JobState.DRAFT).delete()
        raise
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
                "not_stoppable",
                f"{job.name} is {job.get_state_display().lower()}, so it cannot be stopped.",
            )
        attempt = job.current_attempt
        if attempt is None or job.state in {JobState.QUEUED, JobState.PREFLIGHT}:
            is_over = transition(job, JobState.STOPPED, actor=by, attempt=attempt, reason=reason)
            if is_over and attempt is not None:
                Attempt.objects.filter(pk=attempt.pk).update(stop_reason=reason)
                release_unstarted(attempt)
        elif job.state != JobState.STOPPING and transition(
            job, JobState.STOPPING, actor=by, attempt=attempt, reason=reason
        ):
            order_stop(members_of(attempt), reason)
    if attempt is None:
        allocate_pool(job.pool)
    else:
        allocate_after(attempt)
    job.refresh_from_db()
    return job


def job_clone(*, job: Job, owner: User) -> Job:
    """Return a draft copy of ``job`` owned by ``owner``, which runs from the start."""
    return _copy_of(job, owner, " (copy)", resume_from="")


def job_resume(*, job: Job, owner: User, num_hosts: int | None = None) -> Job:
    """Return a draft that goes on from what an ended job left on its hosts, owned by ``owner``.

    ``num_hosts``: of a training on several hosts, on how many it goes on, by default as many. Each
    keeps the whole checkpoint, so that one of them is enough.

    Raises:
        ConflictProblem: no job can go on from this one; the problem says what can be done.
        InvalidProblem: it cannot go on on so many hosts.
    """
    hosts = hosts_to_resume_on(job)
    count = num_hosts or job.num_hosts
    requested = _first_in_contact(hosts) if count == 1 else None
    layout = _layout_on(job, count) if count != job.num_hosts else {}
    resumed = _copy_of(job, owner, " (resumed)", resume_from=job.pk, requested_host=requested)
    if count != job.num_hosts:  # the figures are of another number of ranks
        resumed.spec = {**resumed.spec, **layout}
        resumed.num_hosts, resumed.estimate, resumed.prediction = count, {}, {}
        resumed.save(update_fields=["spec", "num_hosts", "estimate", "prediction"])
    return resumed


def _first_in_contact(hosts: Sequence[Host]) -> Host:
    return next((host for host in hosts if contact_of(host) is Contact.LIVE), hosts[0])


def _layout_on(job: Job, count: int) -> dict[str, Any]:
    """Return the layout of a job's spec for so many hosts, if it has one.

    Raises:
        InvalidProblem: it cannot go on on so many.
    """
    most = Host.objects.filter(pool=job.pool, kind__in=RUNS_JOBS).count()
    layout, fault = job.spec.get("layout"), ""
    if job.num_hosts == 1:
        fault = f"{job.name} ran on one host, and goes on there; leave num_hosts out"
    elif not 1 <= count <= most:
        fault = f"pool {job.pool.name} has {counted(most, 'host')}; choose 1 to {most}"
    elif layout is not None:
        found = LayoutOptions.model_validate(layout)
        try:
            fitting = found.on_ranks(found.world_size * count // job.num_hosts)
            return {"layout": fitting and fitting.model_dump(mode="json")}
        except ValidationError as error:
            fault = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        except ValueError as error:
            fault = str(error)
    if fault:
        raise InvalidProblem("bad_num_hosts", f"num_hosts is {count}: {fault}.")
    return {}


def resumed_job(job: Job) -> Job | None:
    """Return the job that this one goes on from, if it is still listed."""
    source = job.spec.get("resume_from")
    return (
        Job.objects.filter(pk=source, team=job.team, deleted_at=None).first() if source else None
    )


def is_resumable(job: Job) -> bool:
    """Return whether a job can go on from what this one left."""
    try:
        hosts_to_resume_on(job)
    except ConflictProblem:
        return False
    return True


# Ends of which nothing is wrong with the job: what it has done can be gone on from.
INTERRUPTED = STOPPED | {
    Reason.MAX_DURATION,
    Reason.HOST_REBOOTED,
    Reason.SUPERVISOR_LOST,
    Reason.KILLED_EXTERNALLY,
    Reason.DISK_FULL,
    Reason.GPU_FAULT,
}


def words_of(job: Job) -> Words:
    """Return why a job ended and the next step: if that helps, to resume it."""
    words = words_for(job.reason)
    if job.reason not in INTERRUPTED or not is_resumable(job):
        return words
    step = f"Resume it to go on from what it has done. {words.next_step}"
    return words._replace(next_step=step)


def hosts_to_resume_on(job: Job) -> list[Host]:
    """Return the hosts that keep what an ended job left, as far as they have said.

    Raises:
        ConflictProblem: no job can go on from this one; the problem says what can be done.
    """
    parts = Attempt.objects.filter(job=job, started_at__isnull=False).select_related("host")
    rows = list(parts.order_by("number", "node_rank"))
    last = [each for each in rows if each.number == rows[-1].number]
    listed = [each for each in last if each.host.state != HostState.RETIRED]
    kept = [
        each
        for each in listed
        if each.checkpoint_bytes != 0 and each.pk not in each.host.checks.get(ORDERS, {})
    ]
    names = " and ".join(each.host.name for each in last)
    why, instead = "", "Run it again from the start."
    if job.state not in FINAL_STATES:
        state, instead = job.get_state_display().lower(), "Stop it first, or wait for its end."
        why = f"is {state}, and a job is resumed when it has ended"
    elif job.state == JobState.SUCCEEDED:
        why = "has done all that it was to do"
    elif job.kind not in RESUMABLE_KINDS:
        why = f"is of the kind {job.kind}, which leaves nothing to go on from"
    elif not last:
        why = "never started"
    elif not listed:
        why = f"ran on {names}, which {'is' if len(last) == 1 else 'are'} retired"
    elif not kept:
        why = f"keeps no checkpoint on {names}"
    if why:
        raise ConflictProblem("not_resumable", f"{job.name} {why}. {instead}")
    return [each.host for each in kept]


def _copy_of(
    job: Job, owner: User, suffix: str, *, resume_from: str, requested_host: Host | None = None
) -> Job:
    name = (
        job.name if job.name.endswith(suffix) else job.name[: NAME_LENGTH - len(suffix)] + suffix
    )
    spec = {**job.spec, "resume_from": resume_from} if job.kind in RESUMABLE_KINDS else job.spec
    return Job.objects.create(
        team=job.team,
        owner=owner,
        pool=job.pool,
        requested_host=requested_host or job.requested_host,
        num_hosts=job.num_hosts,
        devices_per_host=job.devices_per_host,
        shared_bytes=job.shared_bytes,
        kind=job.kind,
        spec=spec,
        name=name,
        model_name=job.model_name,
        plan=job.plan,
        plan_request=job.plan_request,
        estimate=job.estimate,
        prediction=job.prediction,
        max_duration_seconds=job.max_duration_seconds,
        max_retries=job.max_retries,
    )


def job_delete(*, job: Job, by: str) -> None:
    """Hide a job from lists; its measurements still calibrate its host.

    Its hosts are ordered to delete its checkpoints, and its output unless that is a team's model.

    Raises:
        ConflictProblem: the job has not ended.
    """
    rows = Job.objects.filter(pk=job.pk, state__in=[*FINAL_STATES, JobState.DRAFT])
    if not rows.update(deleted_at=now()):
        raise ConflictProblem(
            "still_live", f"{job.name} is {job.get_state_display().lower()}; stop it first."
        )
    files_release(job=job, by=by)


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
