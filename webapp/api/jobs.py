"""What pages and scripts call about jobs: series, events, tickets for the live stream."""

import math
from typing import Annotated, Any

import numpy as np
from django.http import HttpRequest
from ninja import Query, Router, Schema
from numpy.typing import NDArray

from webapp.accounts.roles import visible_or_404
from webapp.api.auth import PersonAuth
from webapp.api.problems import REFUSALS
from webapp.core.problems import InvalidProblem
from webapp.jobs.models import AttemptEvent, Job
from webapp.jobs.parts import part_at
from webapp.live.tickets import ticket_for
from webapp.metrics.read import FOREVER_MS, Range, Series, read_series

router = Router(tags=["jobs"], auth=PersonAuth())
Rank = Annotated[int, Query(ge=0, le=9999)]
MAX_EVENTS = 1000
MAX_TOPICS = 32  # of one ticket: a page follows two or three


class SeriesReply(Schema):
    """One metric; a null value is a gap."""

    source: str
    metric: str
    t_ms: list[int]
    value: list[float | None]
    low: list[float | None]
    high: list[float | None]


class JobSeries(Schema):
    """The wanted metrics of a job's current attempt."""

    job: str
    attempt: str | None
    series: list[SeriesReply]


class StoredEvent(Schema):
    """One numbered event of an attempt."""

    seq: int
    t_ms: int
    kind: str
    body: dict[str, Any]


class JobEvents(Schema):
    """Events after a number, in order; ``last_seq`` is where to go on."""

    attempt: str | None
    events: list[StoredEvent]
    last_seq: int


class Ticket(Schema):
    """What opens ``/live/`` for an hour, for these topics only."""

    ticket: str


@router.get("/jobs/{job_id}/series", response={200: JobSeries, **REFUSALS})
def series(  # noqa: PLR0913, PLR0917 (each is a parameter of the address)
    request: HttpRequest,
    job_id: str,
    metrics: str,
    since: int = 0,
    until: int = FOREVER_MS,
    points: Annotated[int, Query(ge=10, le=5000)] = 600,
    host: Rank = 0,
) -> JobSeries:
    """Return comma-separated ``metrics`` between two instants in ms, down-sampled.

    Of a job on several hosts they are those that the host number ``host`` reported.
    """
    job = visible_or_404(Job, request.user, pk=job_id, deleted_at=None)
    part = part_at(job, host)
    attempt = part.pk if part else None
    wanted = [name.strip() for name in metrics.split(",") if name.strip()]
    found = read_series(attempt, wanted, Range(since, until), points=points) if attempt else []
    return JobSeries(job=job.pk, attempt=attempt, series=[_reply(item) for item in found])


@router.get("/jobs/{job_id}/events", response={200: JobEvents, **REFUSALS})
def events(
    request: HttpRequest, job_id: str, after: int = 0, kind: str = "", host: Rank = 0
) -> JobEvents:
    """Return at most a thousand events of the current attempt after a number.

    Of a job on several hosts they are those that the host number ``host`` reported.
    """
    job = visible_or_404(Job, request.user, pk=job_id, deleted_at=None)
    part = part_at(job, host)
    rows = AttemptEvent.objects.filter(attempt=part, seq__gt=after)
    if kind:
        rows = rows.filter(kind__in=kind.split(","))
    found = [
        StoredEvent(seq=row.seq, t_ms=row.t_ms, kind=row.kind, body=row.body)
        for row in rows[:MAX_EVENTS]
    ]
    last = found[-1].seq if found else after
    return JobEvents(attempt=part.pk if part else None, events=found, last_seq=last)


@router.get("/tickets", response={200: Ticket, **REFUSALS})
def ticket(request: HttpRequest, topics: str) -> Ticket:
    """Return a fresh ticket for comma-separated topics, as far as the caller may see them."""
    wanted = {topic.strip() for topic in topics.split(",")}
    if len(wanted) > MAX_TOPICS:
        raise InvalidProblem(
            "topics",
            f"topics names {len(wanted)} topics; one ticket has at most {MAX_TOPICS}: ask for "
            "several, or follow the lists “jobs” and “hosts”.",
        )
    return Ticket(ticket=ticket_for(request.user, wanted))


def _reply(item: Series) -> SeriesReply:
    return SeriesReply(
        source=item.source,
        metric=item.metric,
        t_ms=[int(t) for t in item.t_ms],
        value=_nullable(item.value),
        low=_nullable(item.low),
        high=_nullable(item.high),
    )


def _nullable(column: NDArray[np.float64]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in column.tolist()]
