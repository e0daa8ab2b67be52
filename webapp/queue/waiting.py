"""The queued jobs of a pool: all of them, or candidates for the first turns.

Each turn is the first job of some team, so the first turns are among the first jobs of each
team, however long the queue is. An index keeps each team's jobs in order.
"""

from collections.abc import Sequence
from typing import NamedTuple

from django.db.models import Count, Prefetch, QuerySet

from webapp.hosts.models import Host, Pool
from webapp.jobs.indexes import IN_TURN
from webapp.jobs.models import Job, JobState

READ_OF_HOSTS = (  # fields for decisions and messages; a host that receives a job is read by key
    "name", "slug", "kind", "state", "pool", "team", "address", "last_seen_at", "last_beat",
)  # fmt: skip
LARGE_OF_JOBS = ("plan_request", "estimate", "result")


class Waiting(NamedTuple):
    """Candidate jobs for the first turns, and the total number of queued jobs."""

    jobs: list[Job]
    num_waiting: int


def waiting_jobs(pool: Pool) -> list[Job]:
    """Return every queued job of a pool."""
    return _with_relations(_queued(pool), pool)


def first_waiting(pool: Pool, turns: int) -> Waiting:
    """Return the candidates for the first ``turns`` of a pool's queue."""
    numbers = num_by_team(pool)
    num_waiting = sum(numbers.values())
    if num_waiting <= turns:
        return Waiting(waiting_jobs(pool), num_waiting)
    keys = [key for team in numbers for key in _first_of(pool, team, turns)]
    return Waiting(_with_relations(_queued(pool).filter(pk__in=keys), pool), num_waiting)


def num_by_team(pool: Pool) -> dict[str, int]:
    """Return the number of queued jobs per team in a pool."""
    teams = _queued(pool).order_by().values_list("team")
    return dict(teams.annotate(number=Count("*")))


def num_before(job: Job) -> int:
    """Return the number of jobs of the same team before a queued job.

    The keys come from the index in order: counting by conditions would read the rows.
    """
    queued = _queued(job.pool).filter(team=job.team_id).order_by(*IN_TURN)
    keys = list(queued.values_list("pk", flat=True))
    return keys.index(job.pk) if job.pk in keys else len(keys)


def _queued(pool: Pool) -> QuerySet[Job]:
    return Job.objects.filter(pool=pool, state=JobState.QUEUED, deleted_at=None)


def _first_of(pool: Pool, team: str, number: int) -> Sequence[str]:
    queued = _queued(pool).filter(team=team).order_by(*IN_TURN)
    return list(queued.values_list("pk", flat=True)[:number])


def _with_relations(jobs: QuerySet[Job], pool: Pool) -> list[Job]:
    hosts = Host.objects.only(*READ_OF_HOSTS)
    # Pools, teams, owners and hosts repeat across jobs: prefetching reads each once.
    rows = jobs.defer(*LARGE_OF_JOBS).prefetch_related("team", "owner")
    loaded = list(rows.prefetch_related(Prefetch("requested_host", queryset=hosts)))
    for job in loaded:
        job.pool = pool
    return loaded
