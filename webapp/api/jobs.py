"""Operations on jobs: list, stop, run again, logs, events, metrics, figures, artefacts."""

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, cast

import numpy as np
from asgiref.sync import sync_to_async
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpRequest, StreamingHttpResponse
from django.urls import reverse
from ninja import Query, Router, Schema, Status
from numpy.typing import NDArray
from pydantic import Field

from runners.client.replies.base import Reply
from runners.client.replies.jobs import (
    Action,
    ArtefactPage,
    ArtefactReply,
    AttemptReply,
    EndpointReply,
    FigureReply,
    HistoryReply,
    JobDetail,
    JobEvents,
    JobFiguresReply,
    JobPage,
    JobReply,
    JobResult,
    JobSeries,
    LoadLimitReply,
    LogLine,
    LogReply,
    OutcomeReply,
    PriorityWord,
    ProgressReply,
    SeriesReply,
    StoredEvent,
    TargetReply,
    Ticket,
)
from runners.jobspec.compress import LIMIT_FIGURES
from runners.shared.kinds import EventKind
from runners.shared.load_search import limit_words
from runners.shared.log_text import shortened
from runners.shared.reasons import Reason
from runners.shared.timing import STREAM_PING_SECONDS
from webapp.accounts.models import Membership, team_ids_of
from webapp.accounts.services import membership_of, signed_in, visible_or_404
from webapp.api.auth import LAUNCH, READ
from webapp.api.instants import Instant
from webapp.api.requests import Paging, Sent, page_keys, page_of
from webapp.audit.models import Event
from webapp.charts.plots import BY_KIND
from webapp.core.clock import now, now_ms
from webapp.core.figures import definition_of
from webapp.core.problems import REFUSALS, BusyProblem, ConflictProblem, InvalidProblem, bytes_out
from webapp.core.queries import in_order
from webapp.core.search import folded
from webapp.hosts.models import Host
from webapp.hosts.services import Contact, contact_of
from webapp.jobs.artefact_archive import artefact_response
from webapp.jobs.artefacts import artefacts_of
from webapp.jobs.benchmark_reports import load_report, planned_limit
from webapp.jobs.endpoints import endpoint_of
from webapp.jobs.listing import filter_jobs
from webapp.jobs.logs import LOG_KINDS, Line, lines_of, log_lines, with_replaced
from webapp.jobs.lookup import load_job, visible_jobs
from webapp.jobs.measured_figures import as_json, figures_of
from webapp.jobs.measured_targets import target_json, targets_of
from webapp.jobs.models import (
    DOCUMENTS,
    FINAL_STATES,
    Attempt,
    AttemptEvent,
    Job,
    JobState,
    Priority,
)
from webapp.jobs.parts import part_at
from webapp.jobs.permissions import allowed, job_for
from webapp.jobs.progress import KIND_WORDS, elapsed_seconds, progress, silence_of
from webapp.jobs.restarting import start_elsewhere
from webapp.jobs.services import (
    is_resumable,
    job_abandon,
    job_clone,
    job_delete,
    job_resume,
    job_stop,
    job_submit,
    silent_parts,
    words_of,
)
from webapp.jobs.waiting import waiting_sentence
from webapp.live.stream import ticket_for
from webapp.metrics.models import MetricSource
from webapp.metrics.store import FOREVER_MS, Range, Series, read_series
from webapp.plans.models import Plan

router = Router(tags=["jobs"], auth=READ)
Rank = Annotated[
    int,
    Query(ge=0, le=9999, description="Of a job on several hosts: which one, 0 to 9999, from 0"),
]
PRIORITY_WORDS: dict[int, PriorityWord] = {
    Priority.LOW: "low",
    Priority.NORMAL: "normal",
    Priority.HIGH: "high",
}
MAX_EVENTS = 1000
EVENTS_AT_ONCE = 100  # read from the database
MAX_EVENT_BYTES = 256 * 1024  # a log event may have 64 KiB
MAX_TOPICS = 32  # per ticket; a page subscribes to two or three
MAX_LINES = 2000
EPOCH = datetime.fromtimestamp(0, tz=UTC)


# Jobs


OF_LIST = ("host", "requested_host", "pool", "owner")


def job_reply(job: Job) -> JobReply:
    """Return a job as lists show it."""
    return JobReply(**_job_fields(job))


def _job_fields(job: Job) -> dict[str, Any]:
    shown = progress(job)
    return {
        "id": job.pk,
        "name": job.name,
        "kind": job.kind,
        "model": job.model_name,
        "state": job.state,
        "is_final": job.state in FINAL_STATES,
        "team": job.team_id,
        "owner": job.owner.get_username() if job.owner else "",
        "host": job.shown_host.slug if job.shown_host else "",
        "pool": job.pool.name,
        "plan": job.plan_id,
        "priority": PRIORITY_WORDS[job.priority],
        "num_hosts": job.num_hosts,
        "progress": ProgressReply(
            share=shown.share,
            done=job.progress_done,
            total=job.progress_total,
            unit=job.progress_unit,
            phase=job.phase,
            words=shown.words,
            eta_seconds=shown.remaining_seconds,
            quiet_seconds=shown.quiet_seconds,
        ),
        "elapsed_seconds": elapsed_seconds(job),
        "created_at": job.created_at,
        "queued_at": job.queued_at,
        "started_at": job.started_at,
        "ended_at": job.ended_at,
        "url": reverse("job-detail", args=[job.pk]),
    }


def _load_limit(job: Job) -> LoadLimitReply | None:
    """Return what a load test found that searched for its levels; None of other jobs."""
    report = load_report(job)
    if report is None or report.limit is None:
        return None
    figure = LIMIT_FIGURES[report.arrivals]
    return LoadLimitReply(
        figure=figure,
        unit=definition_of(figure).unit,
        **report.limit.model_dump(),
        words=f"{limit_words(report)}.",
        predicted=planned_limit(job, report),
    )


def job_detail(job: Job, request: HttpRequest) -> JobDetail:
    """Return a job as its page shows it."""
    endpoint, silence = endpoint_of(job), silence_of(job)
    attempts = Attempt.objects.filter(job=job).select_related("host")
    held = allowed(membership_of(request.user, job.team), job)
    possible: dict[Action, bool] = {
        "stop": held.stop,
        "run_again": held.clone,
        "resume": held.clone and is_resumable(job),
        "delete": held.delete,
        "abandon": held.abandon and bool(silent_parts(job)),
    }
    outcome = None
    if job.state in FINAL_STATES and job.reason not in {"", Reason.OK}:
        words = words_of(job)
        outcome = OutcomeReply(
            reason=job.reason, sentence=words.sentence, next_step=words.next_step
        )
    return JobDetail(
        **_job_fields(job),
        spec=job.spec,
        prediction=job.prediction,
        result=JobResult(
            measured=job.result.get("measured") or {}, notes=job.result.get("notes") or {}
        ),
        load_limit=_load_limit(job),
        max_duration_seconds=job.max_duration_seconds,
        max_retries=job.max_retries,
        num_retries=job.num_retries,
        waiting=waiting_sentence(job),
        silent_seconds=silence.seconds if silence else None,
        endpoint=EndpointReply(url=endpoint.url, model=endpoint.model) if endpoint else None,
        outcome=outcome,
        attempts=[
            AttemptReply(
                id=each.pk,
                number=each.number,
                rank=each.node_rank,
                host=each.host.slug,
                created_at=each.created_at,
                started_at=each.started_at,
                ended_at=each.ended_at,
            )
            for each in attempts
        ],
        allowed=[name for name, may in possible.items() if may],
    )


class JobFilters(Paging):
    """Filters of the list of jobs; several values of ``state`` are separated by commas."""

    state: Annotated[
        str,
        Query(
            description=f"One or more of {', '.join(JobState.values)}, separated by commas",
            examples=["running", "queued,running"],
        ),
    ] = ""
    kind: Annotated[str, Query(description=f"One of {', '.join(KIND_WORDS)}")] = ""
    host: Annotated[str, Query(description="Slug of a host")] = ""
    owner: Annotated[str, Query(description="User name")] = ""
    plan: Annotated[str, Query(description="Id of a plan")] = ""
    q: Annotated[str, Query(description="Part of the job's or the model's name")] = ""
    created_after: Annotated[
        Instant | None,
        Query(description="Made at this instant, such as 2026-11-28T09:00:00Z, or later"),
    ] = None
    created_before: Annotated[Instant | None, Query(description="Made before this instant")] = None
    sort: Annotated[
        Literal["-created_at", "created_at"],
        Query(description="-created_at: newest first; created_at: oldest first"),
    ] = "-created_at"


@router.get("/jobs", response={200: JobPage, **REFUSALS}, operation_id="list_jobs")
def job_list(request: HttpRequest, filters: Query[JobFilters]) -> JobPage:
    """Return the teams' jobs, newest first unless ``sort`` says otherwise."""
    listed = page_keys(
        _filtered(request, filters),
        "created_at",
        team_ids_of(request.user),
        filters,
        is_rising=filters.sort == "created_at",
    )
    rows = in_order(Job.objects.select_related(*OF_LIST).defer(*DOCUMENTS), listed.keys)
    items = [job_reply(job) for job in rows]
    return JobPage(items=items, next_cursor=listed.next_cursor)


def _filtered(request: HttpRequest, filters: JobFilters) -> QuerySet[Job]:
    states = {name.strip() for name in filters.state.split(",") if name}
    if unknown := sorted(states - set(JobState.values)):
        raise InvalidProblem(
            "state",
            f"There is no state {unknown[0][:40]!r}; there are {', '.join(JobState.values)}.",
        )
    if filters.kind and filters.kind not in KIND_WORDS:
        raise InvalidProblem(
            "kind", f"There is no kind {filters.kind[:40]!r}; there are {', '.join(KIND_WORDS)}."
        )
    teams = team_ids_of(request.user)
    known = {
        "host": Host.objects.filter(team__in=teams, slug=filters.host),
        "owner": Membership.objects.filter(team__in=teams, user__username=filters.owner),
        "plan": Plan.objects.filter(team__in=teams, pk=filters.plan),
    }
    jobs = visible_jobs(request)
    wanted = filters.model_dump(include={"state", "kind", "host", "owner", "plan"})
    wanted["q"] = filters.q.strip()
    if filters.created_after:
        jobs = jobs.filter(created_at__gte=filters.created_after)
    if filters.created_before:
        jobs = jobs.filter(created_at__lt=filters.created_before)
    for name, rows in known.items():
        value = wanted[name]
        if value and not rows.exists() and not filter_jobs(jobs, {name: value}).exists():
            raise InvalidProblem(
                name, f"Your teams have no {name} {value[:40]!r}, and no job of one."
            )
    return filter_jobs(jobs, wanted)


@router.get("/jobs/{job_id}", response={200: JobDetail, **REFUSALS}, operation_id="get_job")
def job_get(request: HttpRequest, job_id: str) -> JobDetail:
    """Return a job with its spec, its attempts and why it waits or ended."""
    return job_detail(load_job(request, job_id), request)


@router.post(
    "/jobs/{job_id}/stop",
    auth=LAUNCH,
    response={200: JobDetail, **REFUSALS},
    operation_id="stop_job",
)
def job_end(request: HttpRequest, job_id: str) -> JobDetail:
    """Stop a job; its supervisor lets it save its results first."""
    job = job_for(request, job_id, "stop")
    is_own = job.owner_id == request.user.pk
    reason = Reason.STOPPED_BY_USER if is_own else Reason.STOPPED_BY_OPERATOR
    job_stop(job=job, by=request.user.get_username(), reason=reason)
    return job_detail(load_job(request, job_id), request)


@router.post(
    "/jobs/{job_id}/run-again",
    auth=LAUNCH,
    response={201: JobDetail, **REFUSALS},
    operation_id="run_job_again",
)
def job_again(request: HttpRequest, job_id: str) -> Status[JobDetail]:
    """Queue a job with the same spec, owned by the caller, that runs from the start."""
    job = job_for(request, job_id, "clone")
    user = signed_in(request)
    copy = job_submit(job=job_clone(job=job, owner=user), by=user.get_username())
    return Status(201, job_detail(load_job(request, copy.pk), request))


@router.post(
    "/jobs/{job_id}/resume",
    auth=LAUNCH,
    response={201: JobDetail, **REFUSALS},
    operation_id="resume_job",
)
def job_go_on(
    request: HttpRequest,
    job_id: str,
    num_hosts: Annotated[
        int | None,
        Query(ge=1, description="Of a training on several hosts: on how many it goes on"),
    ] = None,
) -> Status[JobDetail]:
    """Queue a job that goes on from the checkpoint of an ended one, on its hosts.

    Of a batch generation the finished answers are kept, of a compression the finished layers. A
    training on several hosts goes on on as many, or on ``num_hosts``: each keeps the checkpoint.
    """
    job, user = job_for(request, job_id, "resume"), signed_in(request)
    draft = job_resume(job=job, owner=user, num_hosts=num_hosts)
    resumed = job_submit(job=draft, by=user.get_username())
    return Status(201, job_detail(load_job(request, resumed.pk), request))


class Abandoning(Sent):
    """The confirmation to abandon a job: the names of its unreachable hosts."""

    host_name: Annotated[
        str,
        Field(
            max_length=2000,
            description="Names of the job's unreachable hosts, separated by commas; up to 2000 "
            "characters",
        ),
    ]
    elsewhere: Annotated[
        str,
        Field(
            max_length=80,
            description="Slug of a host to start again on, or “pool” for any of the pool; empty: "
            "not at all",
        ),
    ] = ""


@router.post(
    "/jobs/{job_id}/abandon",
    auth=LAUNCH,
    response={200: JobDetail, **REFUSALS},
    operation_id="abandon_job",
)
def job_give_up(request: HttpRequest, job_id: str, body: Abandoning) -> JobDetail:
    """Count the devices of a job's unreachable hosts as free, and end the job.

    With ``elsewhere`` a copy of it starts on another host; the reply is then the copy.
    """
    job = job_for(request, job_id, "abandon")
    starts_again = bool(body.elsewhere) and job.state not in FINAL_STATES
    with transaction.atomic():  # a copy that is refused leaves the job as it was
        job_abandon(job=job, by=request.user.get_username(), typed_host_name=body.host_name)
        host_id = Host.objects.filter(slug=body.elsewhere).values_list("pk", flat=True).first()
        place = host_id or body.elsewhere
        copy = start_elsewhere(job, place, signed_in(request)) if starts_again else None
    if not starts_again:
        return job_detail(load_job(request, job_id), request)
    if copy is None:
        raise ConflictProblem(
            "no_host",
            "The job is abandoned, and that host cannot take it now. Run the job again on another "
            "host.",
        )
    return job_detail(load_job(request, copy.pk), request)


@router.delete(
    "/jobs/{job_id}", auth=LAUNCH, response={204: None, **REFUSALS}, operation_id="delete_job"
)
def job_remove(request: HttpRequest, job_id: str) -> Status[None]:
    """Delete an ended job from the history; its measurements still calibrate its host.

    Its hosts delete its checkpoints, and its output unless that is a model of the team.
    """
    job_delete(job=job_for(request, job_id, "delete"), by=request.user.get_username())
    return Status(204, None)


# The log


class LogQuery(Schema):
    """Which lines: after an event, or the last ones; of those that contain ``q``."""

    after: Annotated[int | None, Query(ge=0, description="Lines after this event")] = None
    limit: Annotated[
        int, Query(ge=1, le=MAX_LINES, description=f"Most lines, 1 to {MAX_LINES}")
    ] = 200
    q: Annotated[str, Query(description="Part of the line, in any case; also with “after”")] = ""
    rank: Rank = 0


@router.get("/jobs/{job_id}/log", response={200: LogReply, **REFUSALS}, operation_id="get_job_log")
def job_log(request: HttpRequest, job_id: str, query: Query[LogQuery]) -> LogReply:
    """Return the last lines of a job's log, or those after an event, in order."""
    job = load_job(request, job_id)
    part, is_over = part_at(job, query.rank), job.state in FINAL_STATES
    if query.after is None:
        lines = log_lines(part, limit=query.limit, needle=query.q)
        last = lines[-1].seq if lines else 0
    else:
        after = _within(part, query.after)
        lines, last = lines_after(part, after, query.limit, is_over=is_over, needle=query.q)
    shown = [_log_line(one) for one in lines]
    return LogReply(attempt=part.pk if part else None, lines=shown, last_seq=last)


def _within(part: Attempt | None, after: int) -> int:
    """Return a place among an attempt's events: its end for one beyond it.

    Else who goes on after what was returned would never read anything again.
    """
    numbers = AttemptEvent.objects.filter(attempt=part).order_by("-seq").values_list("seq")
    return min(after, next((seq for (seq,) in numbers[:1]), 0))


def _log_line(line: Line) -> LogLine:
    return LogLine.model_validate(line, from_attributes=True)


def lines_after(
    part: Attempt | None, after: int, limit: int, *, is_over: bool, needle: str = ""
) -> tuple[list[Line], int]:
    """Return the lines of an attempt's events after ``after``, and the last event's number.

    With ``needle`` those that contain it; no line then means that there is none up to that event.
    A line that has not ended comes with the event that ends it, or when the job ``is_over``.
    """
    stored = AttemptEvent.objects.filter(attempt=part, kind__in=LOG_KINDS).order_by("seq")
    folded_needle = folded(needle)
    lines: list[Line] = []
    last, is_end = after, False
    while not lines and not is_end:
        events = list(stored.filter(seq__gt=last)[:EVENTS_AT_ONCE])
        is_end = len(events) < EVENTS_AT_ONCE
        is_rest = is_over and is_end
        replaced = {each.seq: is_old for each, is_old in with_replaced(reversed(events))}
        for event in events:
            lines += [
                replace(line, text=shortened(line.text))
                for line in lines_of(event, is_replaced=replaced[event.seq])
                if (is_rest or not line.is_open) and folded_needle in folded(line.text)
            ]
            last = event.seq
            if len(lines) >= limit:
                break
    return lines, last


# Metrics


@router.get(
    "/jobs/{job_id}/series", response={200: JobSeries, **REFUSALS}, operation_id="get_job_series"
)
def series(
    request: HttpRequest,
    job_id: str,
    metrics: Annotated[
        str,
        Query(description="Names separated by commas, such as loss; without one, none is read"),
    ] = "",
    since: Annotated[
        Instant | None,
        Query(description="First instant, such as 2026-11-28T09:00:00Z; included"),
    ] = None,
    until: Annotated[Instant | None, Query(description="Last instant; included")] = None,
    points: Annotated[
        int, Query(ge=10, le=5000, description="Most points of each metric, 10 to 5000")
    ] = 600,
    rank: Rank = 0,
) -> JobSeries:
    """Return metrics of a job's current attempt between two instants, down-sampled.

    The reply lists the names of all metrics that it has reported, whichever are requested.
    """
    job = visible_or_404(Job, request.user, pk=job_id, deleted_at=None)
    part = part_at(job, rank)
    if since and until and since > until:
        raise InvalidProblem(
            "since",
            f"The field since is {since.isoformat()}, after until, which is {until.isoformat()}; "
            "exchange the two.",
        )
    span = Range(_ms(since) if since else 0, _ms(until) if until else FOREVER_MS)
    attempt = part.pk if part else None
    names = [name.strip() for name in metrics.split(",") if name.strip()]
    reported = _reported(attempt)
    _check_metrics(reported, names)
    reports = read_series(attempt, names, span, points=points) if attempt and names else []
    return JobSeries(
        job=job.pk,
        attempt=attempt,
        series=[_reply(item) for item in reports],
        reported=sorted(reported),
    )


CHARTED = {chart.metric for charts in BY_KIND.values() for chart in charts}
MOST_NAMES = 40


def _reported(attempt: str | None) -> set[str]:
    """Return the names of the metrics that an attempt has reported."""
    sources = MetricSource.objects.filter(attempt_id=attempt).values_list("metrics", flat=True)
    return {name for names in sources for name in names}


def _check_metrics(reported: set[str], names: list[str]) -> None:
    """Refuse a metric that the attempt, which has begun to report, has not and no chart draws.

    Raises:
        InvalidProblem: there is no such metric; the message has those that there are.
    """
    for name in names:
        if reported and name not in reported | CHARTED:
            near = ", ".join(sorted(reported)[:MOST_NAMES])
            raise InvalidProblem(
                "metrics", f"There is no metric {name[:40]!r}; this attempt reported {near}."
            )


def _ms(instant: datetime) -> int:
    """Return an instant in milliseconds since 1970-01-01 UTC."""
    return (instant - EPOCH) // timedelta(milliseconds=1)


@router.get(
    "/jobs/{job_id}/figures",
    response={200: JobFiguresReply, **REFUSALS},
    operation_id="get_job_figures",
)
def figures(request: HttpRequest, job_id: str) -> JobFiguresReply:
    """Return a job's predicted and measured figures, as shown on its page."""
    job = visible_or_404(Job, request.user, pk=job_id, deleted_at=None)
    measured = figures_of(job)
    replies = [FigureReply(**as_json(each)) for each in measured.values()]
    targets = [TargetReply(**target_json(each)) for each in targets_of(job, measured)]
    return JobFiguresReply(
        job=job.pk, state=JobState(job.state), as_of=now(), figures=replies, targets=targets
    )


@router.get(
    "/jobs/{job_id}/events", response={200: JobEvents, **REFUSALS}, operation_id="list_job_events"
)
def events(
    request: HttpRequest,
    job_id: str,
    after: Annotated[int, Query(description="Events after this number; 0: from the first")] = 0,
    kind: Annotated[
        str, Query(description="Kinds separated by commas, such as log,phase,artefact,exited")
    ] = "",
    rank: Rank = 0,
) -> JobEvents:
    """Return events of the current attempt after a sequence number, at most 1000 or 256 KiB.

    Request again after ``last_seq`` until the list is empty.
    """
    job = visible_or_404(Job, request.user, pk=job_id, deleted_at=None)
    part = part_at(job, rank)
    is_begin, after = after == 0, _within(part, after)
    rows = AttemptEvent.objects.filter(attempt=part, seq__gt=after)
    if kind:
        rows = rows.filter(kind__in=kind.split(","))
    listed = list(_bounded(rows[:MAX_EVENTS]))
    last = listed[-1].seq if listed else after
    fields = HistoryReply.model_fields
    past = Event.objects.filter(subject=job.pk).order_by("pk") if is_begin else []
    history = [HistoryReply(**{name: getattr(row, name) for name in fields}) for row in past]
    return JobEvents(
        attempt=part.pk if part else None, events=listed, last_seq=last, history=history
    )


def _bounded(rows: QuerySet[AttemptEvent]) -> Iterator[StoredEvent]:
    """Yield events until their bodies reach ``MAX_EVENT_BYTES``."""
    num_bytes = 0
    read = cast("Generator[AttemptEvent, None, None]", rows.iterator(EVENTS_AT_ONCE))
    with closing(read):
        for row in read:
            at = datetime.fromtimestamp(row.t_ms / 1000, tz=UTC)
            yield StoredEvent(seq=row.seq, at=at, kind=cast("EventKind", row.kind), body=row.body)
            num_bytes += len(json.dumps(row.body))
            if num_bytes >= MAX_EVENT_BYTES:
                return


# Artefacts


@router.get(
    "/jobs/{job_id}/artefacts",
    response={200: ArtefactPage, **REFUSALS},
    operation_id="list_artefacts",
)
def artefacts(request: HttpRequest, job_id: str, paging: Query[Paging]) -> ArtefactPage:
    """Return the artefacts of a job's current attempt."""
    made = sorted(artefacts_of(load_job(request, job_id)), key=lambda one: one.pk)
    shown, more = page_of(f"artefacts {job_id}", made, lambda one: one.name, paging)
    items = [ArtefactReply.model_validate(one, from_attributes=True) for one in shown]
    return ArtefactPage(items=items, next_cursor=more)


@router.get(
    "/jobs/{job_id}/artefacts/{name}",
    response=REFUSALS,
    openapi_extra=bytes_out("The artefact as a .tar file"),
    operation_id="download_artefact",
)
def artefact(request: HttpRequest, job_id: str, name: str) -> StreamingHttpResponse:
    """Return a complete artefact as a .tar file."""
    return artefact_response(load_job(request, job_id), name)


# Server-sent events of one job: its log, state and metrics, resumable by the last event's id.

POLL_SECONDS = 1.0
LIFETIME_SECONDS = 3600.0  # then the client connects again
MOST_STREAMS, MOST_STREAMS_EACH = 200, 20  # of this process, and of one person
KINDS = ("log", "state", "metric")
STREAM_EVENT = {  # OpenAPI 3.1: the schema of an event stream is that of one event
    "type": "object",
    "title": "StreamEvent",
    "required": ["event", "data"],
    "properties": {
        "event": {"enum": [*KINDS, "end"]},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "description": "As JSON: a line of the log, the job, a figure; {} at the end",
        },
        "id": {"type": "string", "description": "Of the log: the event's number"},
    },
}
_open_streams: dict[int, int] = {}
_closing = threading.Event()


def close_streams() -> None:
    """End every open stream of this process within a second; safe in a signal handler."""
    _closing.set()


class StreamQuery(Schema):
    """Which events: kinds separated by commas, and log lines after an event."""

    kinds: Annotated[str, Query(description="Of log, state, metric")] = "log,state"
    after: Annotated[
        int, Query(ge=0, description="Log lines after this event; ``Last-Event-ID`` goes before")
    ] = 0
    rank: Rank = 0


@dataclass
class Follower:
    """The position of one reader of a job's events."""

    job_id: str
    kinds: frozenset[str]
    rank: int
    after: int
    since_ms: int
    attempt: str | None = None
    shown_state: str = ""

    def step(self) -> tuple[list[bytes], bool]:
        """Return the new events as frames, and whether the job and its events are at an end."""
        job = Job.objects.select_related(*OF_LIST, "current_attempt", "team").get(pk=self.job_id)
        part = part_at(job, self.rank)
        if part is not None and part.pk != self.attempt:
            if self.attempt is not None:
                self.after = 0  # a retry numbers its events anew
            self.attempt = part.pk
        is_over = job.state in FINAL_STATES and not _is_open(part)
        frames, num_lines = [], 0
        if "log" in self.kinds and part is not None:
            lines, self.after = lines_after(part, self.after, MAX_LINES, is_over=is_over)
            num_lines = len(lines)
            frames += [_frame("log", _log_line(line), line.seq) for line in lines]
        if "metric" in self.kinds and part is not None:
            frames += self._metrics(part.pk)
        reply = job_reply(job)
        if "state" in self.kinds and (shown := reply.model_dump_json()) != self.shown_state:
            self.shown_state = shown
            frames.append(_frame("state", reply))
        return frames, is_over and not num_lines

    def _metrics(self, attempt: str) -> Iterator[bytes]:
        names = {
            name
            for source in MetricSource.objects.filter(attempt_id=attempt)
            for name in source.metrics
        }
        found = read_series(attempt, names, Range(self.since_ms, FOREVER_MS))
        for each in found:
            yield _frame("metric", _reply(each))
        newest = max((int(each.t_ms[-1]) for each in found if len(each.t_ms)), default=None)
        if newest is not None:
            self.since_ms = newest + 1


def _is_open(part: Attempt | None) -> bool:
    """Return whether a part of an ended job may still report events."""
    if part is None or part.ended_at is not None:
        return False
    return contact_of(part.host) is Contact.LIVE


def _frame(event: str, data: Reply, number: int | None = None) -> bytes:
    head = f"id: {number}\n" if number is not None else ""
    return f"{head}event: {event}\ndata: {data.model_dump_json()}\n\n".encode(errors="replace")


@router.get(
    "/jobs/{job_id}/stream",
    response=REFUSALS,
    openapi_extra={
        "responses": {
            200: {
                "description": "Server-sent events log, state, metric and end",
                "content": {"text/event-stream": {"schema": STREAM_EVENT}},
            }
        }
    },
    operation_id="follow_job",
)
def job_stream(
    request: HttpRequest, job_id: str, query: Query[StreamQuery]
) -> StreamingHttpResponse:
    """Return a job's events as they come, until it ends; ``Last-Event-ID`` resumes the log."""
    job = load_job(request, job_id)
    part_at(job, query.rank)
    kinds = frozenset(name.strip() for name in query.kinds.split(","))
    if unknown := sorted(kinds - set(KINDS)):
        raise InvalidProblem(
            "kinds",
            f"There is no kind {unknown[0][:40]!r} of events; there are {', '.join(KIND_WORDS)}.",
        )
    last = request.headers.get("Last-Event-ID") or str(query.after)
    if not (last.isascii() and last.isdigit() and len(last) < 18):  # noqa: PLR2004
        raise InvalidProblem(
            "last_event_id",
            f"The header Last-Event-ID is {last[:40]!r}; it is the id of an event of this stream, "
            "a number. Leave it out to begin with the first line.",
        )
    after = int(last)
    user_id = signed_in(request).pk
    num_own = _open_streams.get(user_id, 0)
    if num_own >= MOST_STREAMS_EACH or sum(_open_streams.values()) >= MOST_STREAMS:
        raise BusyProblem(
            "too_many_streams",
            f"{num_own} streams of yours are open; there can be {MOST_STREAMS_EACH} of one person "
            f"and {MOST_STREAMS} in total. Close one, or poll /jobs/{{id}}/log.",
            retry_after_seconds=10,
        )
    follower = Follower(job.pk, kinds, query.rank, after, since_ms=now_ms())
    response = StreamingHttpResponse(
        _follow(follower, user_id), content_type="text/event-stream; charset=utf-8"
    )
    response["Cache-Control"] = "no-store"
    response["X-Accel-Buffering"] = "no"
    return response


async def _follow(follower: Follower, user_id: int) -> AsyncIterator[bytes]:
    """Yield frames until the job has ended, the server stops, or the client is gone."""
    step = sync_to_async(follower.step)
    _open_streams[user_id] = _open_streams.get(user_id, 0) + 1
    loop = asyncio.get_running_loop()
    began = sent = loop.time()
    try:
        yield b"retry: 3000\n\n"
        while loop.time() - began < LIFETIME_SECONDS and not _closing.is_set():
            frames, is_over = await step()
            for frame in frames:
                yield frame
            if is_over:
                yield b"event: end\ndata: {}\n\n"
                return
            if frames:
                sent = loop.time()
            elif loop.time() - sent >= STREAM_PING_SECONDS:
                sent = loop.time()
                yield b": ping\n\n"
            await asyncio.sleep(POLL_SECONDS)
    finally:
        _open_streams[user_id] -= 1
        if not _open_streams[user_id]:
            del _open_streams[user_id]


@router.get("/tickets", response={200: Ticket, **REFUSALS}, operation_id="get_ticket")
def ticket(
    request: HttpRequest,
    topics: Annotated[
        str,
        Query(
            description=f"Up to {MAX_TOPICS}, separated by commas: jobs, hosts, job:ID, plan:ID"
        ),
    ],
) -> Ticket:
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
