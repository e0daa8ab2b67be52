"""Operations on tunings: trials of a plan's best strategies on its host."""

from typing import Annotated

from django.http import HttpRequest
from django.urls import reverse
from ninja import Query, Router, Status

from runners.client.replies.tunings import (
    CandidateReply,
    GainReply,
    TuningPage,
    TuningReply,
)
from runners.plans.refusals import DraftProblem
from runners.plans.tuning import TuningOptions
from webapp.accounts.models import team_ids_of
from webapp.accounts.services import owned_for, signed_in, visible_or_404
from webapp.api.auth import LAUNCH, READ
from webapp.api.plans import plan_to_change
from webapp.api.requests import Paging, job_key, page_keys
from webapp.core.clock import now
from webapp.core.problems import REFUSALS, InvalidProblem
from webapp.core.queries import in_order
from webapp.jobs.series import series_delete, series_stop
from webapp.plans.models import Plan
from webapp.tunings.listing import CandidateRow, TuningView, view_of, views_of
from webapp.tunings.models import Tuning
from webapp.tunings.planning import tuning_plan
from webapp.tunings.services import tuning_of, tuning_start

router = Router(tags=["tunings"], auth=READ)
DryRun = Annotated[
    bool,
    Query(
        description="With true nothing is started or kept: the reply, with status 200, has the "
        "candidates as they are planned, and no id"
    ),
]


def _candidate(row: CandidateRow) -> CandidateReply:
    planned, result = row.planned, row.result
    is_measured = bool(result.num_measured)
    return CandidateReply(
        number=planned.number,
        name=planned.words,
        settings=planned.settings,
        predicted=planned.predicted,
        predicted_low=planned.low,
        predicted_high=planned.high,
        predicted_peak_memory_bytes=planned.peak_bytes,
        state=row.state,
        reason=row.reason,
        note=row.note,
        measured=row.value,
        error_ratio=result.error if is_measured else None,
        num_measured=result.num_measured,
        meets_targets=result.is_met if is_measured else None,
        jobs=[job.pk for job in row.jobs],
    )


def _reply(view: TuningView, planned_seconds: float | None = None) -> TuningReply:
    tuning, found = view.tuning, view.outcome
    return TuningReply(
        id=tuning.pk,
        name=tuning.name,
        state=tuning.state,
        problem=tuning.problem,
        plan=tuning.plan_id,
        host=tuning.host.name if tuning.host else "",
        team=tuning.team_id,
        owner=tuning.owner.get_username() if tuning.owner else "",
        created_at=tuning.created_at,
        ended_at=tuning.ended_at,
        options=tuning.options,
        figure=tuning.figure,
        unit=view.figure.unit,
        num_trials=view.num_ended,
        elapsed_seconds=view.elapsed_seconds,
        planned_seconds=planned_seconds,
        candidates=[_candidate(row) for row in view.rows],
        best=found.best.candidate.number if found.best else None,
        chosen=found.chosen.candidate.number if found.chosen else None,
        gain=GainReply(**vars(found.gain)) if found.gain else None,
        words=view.result_words,
        result=tuning.result_id,
        url=reverse("tuning-detail", args=[tuning.pk]),
    )


@router.post(
    "/plans/{plan_id}/tunings",
    auth=LAUNCH,
    response={200: TuningReply, 201: TuningReply, **REFUSALS},
    operation_id="start_tuning",
)
def tuning_create(
    request: HttpRequest, plan_id: str, body: TuningOptions, *, dry_run: DryRun = False
) -> Status[TuningReply]:
    """Measure a plan's best strategies on its host, one job after another.

    The plan's own choice comes first. The best one becomes the plan's next version if it is
    better in repeated measurements.
    """
    plan, by = plan_to_change(request, plan_id), signed_in(request)
    try:
        if dry_run:
            planned = tuning_plan(plan.team, by, plan, body)
            tuning = tuning_of(plan.team, by, plan, planned)
            tuning.created_at = now()
            shown = _reply(TuningView(tuning, []), planned.seconds)
            return Status(200, shown.model_copy(update={"id": "", "url": ""}))
        tuning = tuning_start(
            team=plan.team, by=by, plan=plan, options=body, idempotency_key=job_key(request)
        )
    except DraftProblem as problem:
        raise InvalidProblem(problem.field or "plan", problem.sentence) from problem
    return Status(201, _reply(view_of(tuning)))


class TuningFilters(Paging):
    """Filters of the list of tunings."""

    plan: Annotated[str, Query(description="Id of a version: the tunings of its plan")] = ""


@router.get("/tunings", response={200: TuningPage, **REFUSALS}, operation_id="list_tunings")
def tuning_list(request: HttpRequest, filters: Query[TuningFilters]) -> TuningPage:
    """Return the teams' tunings, the newest first."""
    teams = team_ids_of(request.user)
    rows = Tuning.objects.filter(team__in=teams)
    if filters.plan:
        version = Plan.objects.filter(pk=filters.plan, team__in=teams)
        rows = rows.filter(plan__series__in=version.values("series"))
    listed = page_keys(rows, "created_at", teams, filters)
    found = in_order(Tuning.objects.select_related("owner", "host"), listed.keys)
    return TuningPage(
        items=[_reply(view) for view in views_of(list(found))], next_cursor=listed.next_cursor
    )


@router.get(
    "/tunings/{tuning_id}", response={200: TuningReply, **REFUSALS}, operation_id="get_tuning"
)
def tuning_get(request: HttpRequest, tuning_id: str) -> TuningReply:
    """Return a tuning with its candidates: what was planned, and what its jobs measured."""
    return _reply(view_of(visible_or_404(Tuning, request.user, pk=tuning_id)))


@router.post(
    "/tunings/{tuning_id}/stop",
    auth=LAUNCH,
    response={200: TuningReply, **REFUSALS},
    operation_id="stop_tuning",
)
def tuning_end(request: HttpRequest, tuning_id: str) -> TuningReply:
    """Stop the trial of a tuning that runs, and start no other; what was measured stays."""
    tuning = owned_for(request, Tuning, pk=tuning_id)
    return _reply(view_of(series_stop(tuning, by=signed_in(request))))


@router.delete(
    "/tunings/{tuning_id}",
    auth=LAUNCH,
    response={204: None, **REFUSALS},
    operation_id="delete_tuning",
)
def tuning_remove(request: HttpRequest, tuning_id: str) -> Status[None]:
    """Take an ended tuning out of the list; its jobs and its version of the plan stay."""
    series_delete(owned_for(request, Tuning, pk=tuning_id), by=signed_in(request))
    return Status(204, None)
