"""Operations of scripts on jobs and plans: figures, events, tickets, exports, limits."""

import json
import math
from collections.abc import Generator, Iterator
from contextlib import closing
from datetime import datetime
from typing import Annotated, Any, Literal, cast

import numpy as np
from django.db.models import QuerySet
from django.http import HttpRequest
from ninja import Query, Router, Schema
from numpy.typing import NDArray

from planner.specs.base import PlannerError
from planner.specs.estimate import InverseQuestion, PlanAnswer
from webapp.accounts.services import visible_or_404
from webapp.api.hosts import PersonAuth
from webapp.core.clock import now
from webapp.core.problems import REFUSALS, InvalidProblem, NotFoundProblem
from webapp.jobs.measured_figures import as_json, figures_of
from webapp.jobs.models import AttemptEvent, Job
from webapp.jobs.targets import target_json, targets_of
from webapp.live.stream import ticket_for
from webapp.metrics.store import FOREVER_MS, Range, Series, read_series
from webapp.pages.attempt_log import part_at
from webapp.pages.plans import export_plan, exports_of
from webapp.plans.explanation import DraftProblem
from webapp.plans.models import Plan
from webapp.plans.planning import current_answer, limit_of

router = Router(tags=["jobs"], auth=PersonAuth())
Rank = Annotated[int, Query(ge=0, le=9999)]
MAX_EVENTS = 1000
EVENTS_AT_ONCE = 100  # read from the database
MAX_EVENT_BYTES = 256 * 1024  # a log event may have 64 KiB
MAX_TOPICS = 32  # per ticket; a page subscribes to two or three


class SeriesReply(Schema):
    """One metric; a null value is a gap."""

    source: str
    metric: str
    t_ms: list[int]
    value: list[float | None]
    low: list[float | None]
    high: list[float | None]


class JobSeries(Schema):
    """The requested metrics of a job's current attempt."""

    job: str
    attempt: str | None
    series: list[SeriesReply]


class FigureReply(Schema):
    """One figure in base units; ``state`` says whether it is measured, and final."""

    name: str
    label: str
    unit: str
    measured: float | None
    predicted: float | None
    predicted_low: float | None
    predicted_high: float | None
    ratio: float | None
    state: Literal["measured", "so_far", "warm_up", "predicted"]
    state_words: str
    definition: str
    how: str


class TargetReply(Schema):
    """One latency target of the plan, evaluated at a percentile of the requests."""

    figure: str
    limit_seconds: float
    percentile: int
    measured: float | None
    state: Literal["met", "missed", "unjudged"]
    chance: float | None


class JobFiguresReply(Schema):
    """Every figure of a job, as shown on its page."""

    job: str
    state: str
    as_of: datetime
    figures: list[FigureReply]
    targets: list[TargetReply]


class StoredEvent(Schema):
    """One numbered event of an attempt."""

    seq: int
    t_ms: int
    kind: str
    body: dict[str, Any]


class JobEvents(Schema):
    """Events after a sequence number, in order; continue after ``last_seq``."""

    attempt: str | None
    events: list[StoredEvent]
    last_seq: int


class Ticket(Schema):
    """A ticket that gives access to ``/live/`` for an hour, for its topics only."""

    ticket: str


@router.get("/jobs/{job_id}/series", response={200: JobSeries, **REFUSALS})
def series(
    request: HttpRequest,
    job_id: str,
    metrics: str,
    since: int = 0,
    until: int = FOREVER_MS,
    points: Annotated[int, Query(ge=10, le=5000)] = 600,
    host: Rank = 0,
) -> JobSeries:
    """Return the comma-separated ``metrics`` between two instants in ms, down-sampled.

    For a job on several hosts, the series are those reported by host number ``host``.
    """
    job = visible_or_404(Job, request.user, pk=job_id, deleted_at=None)
    part = part_at(job, host)
    attempt = part.pk if part else None
    names = [name.strip() for name in metrics.split(",") if name.strip()]
    reports = read_series(attempt, names, Range(since, until), points=points) if attempt else []
    return JobSeries(job=job.pk, attempt=attempt, series=[_reply(item) for item in reports])


@router.get("/jobs/{job_id}/figures", response={200: JobFiguresReply, **REFUSALS})
def figures(request: HttpRequest, job_id: str) -> JobFiguresReply:
    """Return a job's predicted and measured figures, as shown on its page."""
    job = visible_or_404(Job, request.user, pk=job_id, deleted_at=None)
    measured = figures_of(job)
    replies = [FigureReply(**as_json(each)) for each in measured.values()]
    targets = [TargetReply(**target_json(each)) for each in targets_of(job, measured)]
    return JobFiguresReply(
        job=job.pk, state=job.state, as_of=now(), figures=replies, targets=targets
    )


@router.get("/jobs/{job_id}/events", response={200: JobEvents, **REFUSALS})
def events(
    request: HttpRequest, job_id: str, after: int = 0, kind: str = "", host: Rank = 0
) -> JobEvents:
    """Return events of the current attempt after a sequence number, at most 1000 or 256 KiB.

    Request again after ``last_seq`` until the list is empty. For a job on several hosts, the
    events are those reported by host number ``host``.
    """
    job = visible_or_404(Job, request.user, pk=job_id, deleted_at=None)
    part = part_at(job, host)
    rows = AttemptEvent.objects.filter(attempt=part, seq__gt=after)
    if kind:
        rows = rows.filter(kind__in=kind.split(","))
    listed = list(_bounded(rows[:MAX_EVENTS]))
    last = listed[-1].seq if listed else after
    return JobEvents(attempt=part.pk if part else None, events=listed, last_seq=last)


def _bounded(rows: QuerySet[AttemptEvent]) -> Iterator[StoredEvent]:
    """Yield events until their bodies reach ``MAX_EVENT_BYTES``."""
    num_bytes = 0
    read = cast("Generator[AttemptEvent, None, None]", rows.iterator(EVENTS_AT_ONCE))
    with closing(read):
        for row in read:
            yield StoredEvent(seq=row.seq, t_ms=row.t_ms, kind=row.kind, body=row.body)
            num_bytes += len(json.dumps(row.body))
            if num_bytes >= MAX_EVENT_BYTES:
                return


@router.get("/tickets", response={200: Ticket, **REFUSALS})
def ticket(request: HttpRequest, topics: str) -> Ticket:
    """Return a new ticket for those of the comma-separated topics that the caller may see."""
    names = {topic.strip() for topic in topics.split(",")}
    if len(names) > MAX_TOPICS:
        raise InvalidProblem(
            "topics",
            f"topics names {len(names)} topics; one ticket has at most {MAX_TOPICS}: request "
            "several tickets, or subscribe to the topics “jobs” and “hosts”.",
        )
    return Ticket(ticket=ticket_for(request.user, names))


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


# Operations of scripts on plans: exports for other tools, and limits such as context length.


plans_router = Router(tags=["plans"], auth=PersonAuth())


class FormatReply(Schema):
    """A format that can express the plan, with notes on what it leaves out."""

    key: str
    title: str
    file_name: str
    notes: list[str]


class PlanFormats(Schema):
    """The formats that can express a plan's first proposal."""

    plan: str
    formats: list[FormatReply]


class ExportReply(FormatReply):
    """A plan in another tool's format, with the script that measures its predictions."""

    text: str
    measure: str


def _answer(plan: Plan) -> PlanAnswer:
    try:
        return current_answer(plan)
    except DraftProblem as problem:
        raise InvalidProblem("draft", str(problem)) from problem


@plans_router.get("/{plan_id}/exports", response={200: PlanFormats, **REFUSALS})
def formats(request: HttpRequest, plan_id: str) -> PlanFormats:
    """Return the formats that a plan can be exported to."""
    plan = visible_or_404(Plan, request.user, pk=plan_id)
    exports = exports_of(plan, _answer(plan))
    fields = FormatReply.model_fields
    listed = [
        FormatReply(**{name: getattr(export, name) for name in fields}) for export in exports
    ]
    return PlanFormats(plan=plan.pk, formats=listed)


@plans_router.get("/{plan_id}/exports/{key}", response={200: ExportReply, **REFUSALS})
def exported(request: HttpRequest, plan_id: str, key: str) -> ExportReply:
    """Return a plan in one format, with its notes and the script that measures it."""
    plan = visible_or_404(Plan, request.user, pk=plan_id)
    try:
        export = export_plan(plan, _answer(plan), key)
    except PlannerError as error:
        raise NotFoundProblem("no_export", error.message) from error
    return ExportReply(**{name: getattr(export, name) for name in ExportReply.model_fields})


@plans_router.get("/{plan_id}/limits/{question}", response={200: dict[str, Any], **REFUSALS})
def limit(request: HttpRequest, plan_id: str, question: InverseQuestion) -> dict[str, Any]:
    """Return a limit of a plan, such as ``longest_context`` or ``most_users``."""
    plan = visible_or_404(Plan, request.user, pk=plan_id)
    try:
        return limit_of(plan, question).model_dump(mode="json")
    except DraftProblem as problem:
        raise InvalidProblem("limit", str(problem)) from problem
