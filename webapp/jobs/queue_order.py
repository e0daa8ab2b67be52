"""Changes of a queue by operators: the order of jobs and their priority."""

import hashlib
from collections.abc import Sequence

from django.db import transaction

from webapp.audit.models import event_record, refuse_if_changed
from webapp.core.problems import ConflictProblem, InvalidProblem
from webapp.hosts.models import Pool
from webapp.jobs.gangs import pool_lock
from webapp.jobs.models import Job, JobState, Priority
from webapp.jobs.pool_state import (
    pool_state_of,
    waiting_jobs,
)
from webapp.jobs.queue_decisions import in_order
from webapp.jobs.quotas import Rules
from webapp.live.stream import jobs_topic, publish_all

MOST_DIGITS = 9  # digits


def order_digest(order: Sequence[str]) -> str:
    """Return a digest of the first turns of a queue; a different order has another digest."""
    return f"{len(order)}_{hashlib.sha256(','.join(order).encode()).hexdigest()[:16]}"


def is_sealed(order: Sequence[str], seen: str) -> bool:
    """Return whether an order begins with the turns that a page showed."""
    number = seen.partition("_")[0]
    is_number = number.isascii() and number.isdigit() and len(number) < MOST_DIGITS
    return is_number and order_digest(order[: int(number)]) == seen


def job_move(*, pool: Pool, job_id: str, is_up: bool, seen: str, by: str) -> Job:
    """Swap a job with its neighbour, if the order still matches the digest ``seen``.

    Raises:
        ConflictProblem: the queue changed meanwhile, the job left it, or its neighbour has
            another priority.
    """
    with transaction.atomic():
        pool_lock(pool.pk)
        waiting = waiting_jobs(pool)
        jobs = {job.pk: job for job in waiting}
        snapshot = pool_state_of(pool, waiting, Rules(waiting)).snapshot
        order = [demand.job for demand in in_order(snapshot)]
        if job_id not in jobs or not is_sealed(order, seen):
            raise ConflictProblem(
                "queue_changed", "The queue has changed, so nothing was moved. Try again."
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
        ranked = [i for i, pk in enumerate(group) if jobs[pk].queue_rank is not None]
        _rank(group, upto=max(old, new, *ranked))
        _record(job, "job.moved", by, {"from": old + 1, "to": new + 1})
    _publish_change(pool)
    return job


def _rank(group: Sequence[str], *, upto: int) -> None:
    """Set manual ranks for the first jobs of a group; later jobs remain in fair order."""
    for rank, pk in enumerate(group[: upto + 1], 1):
        Job.objects.filter(pk=pk).update(queue_rank=rank)


def job_prioritise(*, pool: Pool, job_id: str, priority: str, by: str, seen: str = "") -> Job:
    """Change the priority of a queued job and clear its manual rank.

    Raises:
        InvalidProblem: the priority is unknown.
        ConflictProblem: the job is not queued in this pool any more, or its priority changed
            since the page that showed ``seen``.
    """
    if priority not in {str(value) for value in Priority.values}:
        choices = ", ".join(f"{value} ({label})" for value, label in Priority.choices)
        raise InvalidProblem("priority", f"priority is {priority!r}; it can be {choices}.")
    with transaction.atomic():
        rows = Job.objects.filter(pk=job_id, pool=pool, state=JobState.QUEUED, deleted_at=None)
        job = rows.select_for_update().first()
        if job is None:
            raise ConflictProblem("not_waiting", "The job has left the queue.")
        refuse_if_changed(
            seen=seen,
            now_there=job.priority,
            what=f"The priority of {job.name} was",
            subject=job.pk,
            kind="job.priority",
            reader=by,
        )
        before, job.priority, job.queue_rank = job.priority, int(priority), None
        job.save(update_fields=["priority", "queue_rank"])
        _record(job, "job.priority", by, {"from": before, "to": job.priority})
    _publish_change(pool)
    return job


def _record(job: Job, kind: str, by: str, detail: dict[str, int]) -> None:
    event_record(job, kind, by, from_state=job.state, to_state=job.state, detail=detail)


def _publish_change(pool: Pool) -> None:
    """Refresh open pages of all teams that may launch in the pool."""
    teams = [pool.team_id, *pool.shared_with.values_list("pk", flat=True)]
    publish_all((jobs_topic(team), "queue.changed", {"pool": pool.pk}) for team in teams)
