"""The part of a job, on one of its hosts, that a page shows."""

from django.http import HttpRequest

from webapp.core.parameters import whole_in_query
from webapp.core.problems import InvalidProblem, QueryProblem
from webapp.jobs.models import Attempt, Job
from webapp.jobs.parts import PARAMETER, part_at


def rank_of(request: HttpRequest) -> int:
    """Return the host rank in the query string; 0 if it is missing."""
    return whole_in_query(request, PARAMETER, least=0, default=0)


def shown_part(request: HttpRequest, job: Job) -> Attempt | None:
    """Return the requested part; the first while that host has not begun.

    Raises:
        QueryProblem: the job has no host of this rank.
    """
    rank = rank_of(request)
    try:
        return part_at(job, rank)
    except InvalidProblem as problem:
        if rank >= job.num_hosts:
            raise QueryProblem(PARAMETER, problem.detail) from problem
        return job.current_attempt
