"""What an operator changes in a queue: the order of jobs, and their priority."""

import hashlib
from collections.abc import Sequence

from django.db import transaction

from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, InvalidProblem
from webapp.hosts.models import Pool
from webapp.jobs.holding import pool_lock
from webapp.jobs.models import Event, Job, JobState, Priority
from webapp.live.publish import jobs_topic, publish_all
from webapp.queue.picture import picture_of, waiting_jobs
from webapp.queue.rules import Rules


def seal_of(order: Sequence[str]) -> str:
    """Return a short mark of an order: another mark is another order."""
    return hashlib.sha256(",".join(order).encode()).hexdigest()[:16]


def job_move(*, pool: Pool, job_id: str, is_up: bool, seen: str, by: str) -> Job:
    """Let a job change places with its neighbour, as long as the order is the one ``seen``.

    Raises:
        ConflictProblem: the queue changed meanwhile, the job left it, or its neighbour has
            another priority.
    """
    with transaction.atomic():
        pool_lock(pool.pk)
        waiting = waiting_jobs(pool)
        jobs = {job.pk: job for job in waiting}
        order = list(picture_of(pool, waiting, Rules(waiting)).decide().order)
        if job_id not in jobs or seal_of(order) != seen:
            raise ConflictProblem(
                "queue_changed", "The queue changed meanwhile, so nothing was moved. Look again."
            )
        job = jobs[job_id]
        group = [pk for pk in order if jobs[pk].priority == job.priority]
        old = group.index(job_id)
        new = old + (-1 if is_up else 1)
        if not 0 <= new < len(group):
            raise ConflictProblem(
                "at_the_edge",
                f"{job.name} is {'first' if is_up else 'last'} of its priority; change the "
                "priority to move it further.",
            )
        group[old], group[new] = group[new], group[old]
        _rank(group, upto=max(old, new, _last_ranked(group, jobs)))
        _record(job, "job.moved", by, {"from": old + 1, "to": new + 1})
    _tell(pool)
    return job


def _last_ranked(group: Sequence[str], jobs: dict[str, Job]) -> int:
    return max((i for i, pk in enumerate(group) if jobs[pk].queue_rank is not None), default=0)


def _rank(group: Sequence[str], *, upto: int) -> None:
    """Fix the order of the first of a group by hand; those behind stay as fairness has it."""
    for rank, pk in enumerate(group[: upto + 1], 1):
        Job.objects.filter(pk=pk).update(queue_rank=rank)


def job_prioritise(*, pool: Pool, job_id: str, priority: str, by: str) -> Job:
    """Give a waiting job another priority, and with it a place of its own choosing by fairness.

    Raises:
        InvalidProblem: there is no such priority.
        ConflictProblem: the job does not wait in this pool any more.
    """
    if priority not in {str(value) for value in Priority.values}:
        known = ", ".join(f"{value} ({label})" for value, label in Priority.choices)
        raise InvalidProblem("priority", f"priority is {priority!r}; it can be {known}.")
    with transaction.atomic():
        rows = Job.objects.filter(pk=job_id, pool=pool, state=JobState.QUEUED, deleted_at=None)
        job = rows.select_for_update().first()
        if job is None:
            raise ConflictProblem("not_waiting", "The job left the queue meanwhile.")
        before, job.priority, job.queue_rank = job.priority, int(priority), None
        job.save(update_fields=["priority", "queue_rank"])
        _record(job, "job.priority", by, {"from": before, "to": job.priority})
    _tell(pool)
    return job


def _record(job: Job, kind: str, by: str, detail: dict[str, int]) -> None:
    Event.objects.create(
        at=now(),
        team_id=job.team_id,
        kind=kind,
        subject=job.pk,
        from_state=job.state,
        to_state=job.state,
        actor=by,
        detail=detail,
    )


def _tell(pool: Pool) -> None:
    """Let open pages look again, those of every team that may launch here."""
    teams = [pool.team_id, *pool.shared_with.values_list("pk", flat=True)]
    publish_all((jobs_topic(team), "queue.changed", {"pool": pool.pk}) for team in teams)
