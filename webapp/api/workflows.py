"""Operations on workflows: jobs that follow one another."""

from typing import Annotated, Any

from django.http import HttpRequest
from django.urls import reverse
from ninja import Query, Router, Status

from runners.client.replies.workflows import (
    ForecastFigure,
    StepReply,
    WorkflowPage,
    WorkflowReply,
    WorkflowStarted,
)
from runners.plans.workflow import WorkflowDocument
from webapp.accounts.models import Role, team_ids_of
from webapp.accounts.services import (
    check_role,
    current_membership,
    owned_for,
    signed_in,
    visible_or_404,
)
from webapp.api.auth import LAUNCH, READ
from webapp.api.requests import Paging, job_key, page_keys
from webapp.core.clock import now
from webapp.core.problems import REFUSALS
from webapp.core.queries import in_order
from webapp.jobs.series import series_delete
from webapp.workflows.listing import StepRow, WorkflowView, view_of, views_of
from webapp.workflows.models import Workflow
from webapp.workflows.planning import workflow_plan
from webapp.workflows.services import (
    workflow_of,
    workflow_resume,
    workflow_start,
    workflow_stop,
)

router = Router(tags=["workflows"], auth=READ)
DryRun = Annotated[
    bool,
    Query(
        description="With true nothing is started or kept: every step is planned and checked, and "
        "the reply, with status 200, has a workflow without an id"
    ),
]


def _figures(stored: dict[str, dict[str, Any]]) -> dict[str, ForecastFigure]:
    return {name: ForecastFigure.model_validate(figure) for name, figure in stored.items()}


def _step(row: StepRow) -> StepReply:
    step, job = row.step, row.job
    return StepReply(
        position=step.position,
        variant=step.variant,
        goal=step.goal,
        name=step.title,
        settings=step.settings,
        state=step.state,
        problem=row.problem,
        job=job.pk if job else None,
        job_state=job.state if job else "",
        model=row.model.pk if row.model else None,
        is_best=row.is_best,
        elapsed_seconds=row.elapsed_seconds,
        forecast=_figures(step.forecast),
        measured=row.measured,
    )


def _reply(view: WorkflowView) -> WorkflowReply:
    workflow = view.workflow
    return WorkflowReply(
        id=workflow.pk,
        name=workflow.name,
        state=workflow.state,
        team=workflow.team_id,
        owner=workflow.owner.get_username() if workflow.owner else "",
        created_at=workflow.created_at,
        ended_at=workflow.ended_at,
        steps=[_step(row) for row in view.rows],
        forecast=_figures(view.totals),
        url=reverse("workflow-detail", args=[workflow.pk]),
    )


@router.get("", response={200: WorkflowPage, **REFUSALS}, operation_id="list_workflows")
def workflow_list(request: HttpRequest, paging: Query[Paging]) -> WorkflowPage:
    """Return the teams' workflows, the newest first."""
    teams = team_ids_of(request.user)
    listed = page_keys(Workflow.objects.filter(team__in=teams), "created_at", teams, paging)
    rows = in_order(Workflow.objects.select_related("owner"), listed.keys)
    return WorkflowPage(
        items=[_reply(view) for view in views_of(list(rows))], next_cursor=listed.next_cursor
    )


@router.post(
    "",
    auth=LAUNCH,
    response={200: WorkflowStarted, 201: WorkflowStarted, **REFUSALS},
    operation_id="start_workflow",
)
def workflow_create(
    request: HttpRequest, body: WorkflowDocument, *, dry_run: DryRun = False
) -> Status[WorkflowStarted]:
    """Plan steps as a whole, and start the first; each next one starts when it has ended.

    A later step starts from the model that the last one made. It is done as a whole or not at
    all: where a step cannot be planned, nothing is started.
    """
    membership = current_membership(request)
    check_role(Role(membership.role), Role.PRACTITIONER)
    team, by = membership.team, signed_in(request)
    if dry_run:
        workflow, steps = workflow_of(team, by, body, workflow_plan(team, by, body))
        workflow.created_at = now()
        shown = _reply(WorkflowView(workflow, [StepRow(each) for each in steps]))
        shown = shown.model_copy(update={"id": "", "url": ""})
        return Status(200, WorkflowStarted(workflow=shown, endpoint_key=None))
    started = workflow_start(team=team, by=by, document=body, idempotency_key=job_key(request))
    reply = _reply(view_of(started.workflow))
    return Status(201, WorkflowStarted(workflow=reply, endpoint_key=started.endpoint_key))


@router.get(
    "/{workflow_id}", response={200: WorkflowReply, **REFUSALS}, operation_id="get_workflow"
)
def workflow_get(request: HttpRequest, workflow_id: str) -> WorkflowReply:
    """Return a workflow with its steps: what was planned, and what its jobs measured."""
    return _reply(view_of(visible_or_404(Workflow, request.user, pk=workflow_id)))


@router.post(
    "/{workflow_id}/stop",
    auth=LAUNCH,
    response={200: WorkflowReply, **REFUSALS},
    operation_id="stop_workflow",
)
def workflow_end(request: HttpRequest, workflow_id: str) -> WorkflowReply:
    """Stop the jobs of a workflow that run, and start none of those that wait."""
    workflow = owned_for(request, Workflow, pk=workflow_id)
    return _reply(view_of(workflow_stop(workflow, by=signed_in(request))))


@router.post(
    "/{workflow_id}/resume",
    auth=LAUNCH,
    response={200: WorkflowReply, **REFUSALS},
    operation_id="resume_workflow",
)
def workflow_go_on(request: HttpRequest, workflow_id: str) -> WorkflowReply:
    """Go on with a failed or stopped workflow: what has succeeded stays."""
    workflow = owned_for(request, Workflow, pk=workflow_id)
    return _reply(view_of(workflow_resume(workflow, by=signed_in(request))))


@router.delete(
    "/{workflow_id}",
    auth=LAUNCH,
    response={204: None, **REFUSALS},
    operation_id="delete_workflow",
)
def workflow_remove(request: HttpRequest, workflow_id: str) -> Status[None]:
    """Take an ended workflow out of the lists; its jobs, models and plans stay."""
    series_delete(owned_for(request, Workflow, pk=workflow_id), by=signed_in(request))
    return Status(204, None)
