"""The pages of workflows: the list, one workflow with its steps; stop, resume and delete."""

from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_GET, require_POST

from runners.plans.refusals import DraftProblem
from webapp.accounts.models import team_ids_of
from webapp.accounts.services import (
    may_change,
    membership_of,
    owned_for,
    signed_in,
    visible_or_404,
)
from webapp.accounts.sign_in import session_secret_of
from webapp.core.parameters import page_number, reads_query
from webapp.core.problems import Problem
from webapp.core.queries import NewestFirst, page_by_key
from webapp.live.stream import live_context, page_or_regions
from webapp.wizard.documents import yaml_of
from webapp.workflows.listing import WorkflowView, compared, view_of, views_of
from webapp.workflows.models import Workflow, WorkflowState
from webapp.workflows.services import workflow_delete, workflow_resume, workflow_stop

PAGE_SIZE = 20
WORKFLOW_KEYS = "workflow-keys"  # session key: workflow id -> its endpoint's key, until shown


@require_GET
@reads_query("page")
def workflow_list(request: HttpRequest) -> HttpResponse:
    """List the teams' workflows, the newest first."""
    teams = team_ids_of(request.user)
    keys = NewestFirst(Workflow.objects.filter(team__in=teams), "created_at", teams)
    rows = Workflow.objects.select_related("owner")
    page = page_by_key(keys, rows, page_number(request), PAGE_SIZE)
    context: dict[str, Any] = {"page": page, "views": views_of(list(page.object_list))}
    if context["views"]:
        context |= live_context(request, ["jobs"])
    return page_or_regions(request, "workflows/list.html", "workflows/_list.html", context)


@require_GET
def workflow_detail(request: HttpRequest, workflow_id: str) -> HttpResponse:
    """Show a workflow: what was planned, how far it is, and what each step measured."""
    workflow = visible_or_404(Workflow, request.user, pk=workflow_id)
    view = view_of(workflow)
    key = session_secret_of(request, WORKFLOW_KEYS, workflow.pk)
    if key:
        del request.session[WORKFLOW_KEYS]
    membership = membership_of(request.user, workflow.team)
    is_running = workflow.state == WorkflowState.RUNNING
    may = may_change(membership, workflow)
    context: dict[str, Any] = {
        "view": view,
        "workflow": workflow,
        "tables": _tables(view),
        "endpoint_key": key,
        "may_stop": may and is_running,
        "may_delete": may and not is_running,
        "may_resume": may and workflow.state in {WorkflowState.FAILED, WorkflowState.STOPPED},
        "document": yaml_of(workflow.document),
    }
    context |= live_context(request, ["jobs"])
    return page_or_regions(request, "workflows/detail.html", "workflows/_steps.html", context)


def _tables(view: WorkflowView) -> list[dict[str, Any]]:
    """Return a table per sweep: its values and what was measured with each."""
    tables = []
    for rows in view.sweeps:
        figures = compared(rows)
        lines = [
            (row, [(row.measured.get(each.name), each.unit) for each in figures]) for row in rows
        ]
        tables.append({"figures": figures, "rows": lines})
    return tables


def _act(
    request: HttpRequest, workflow_id: str, act: Callable[..., Workflow], words: str
) -> HttpResponse:
    workflow = owned_for(request, Workflow, pk=workflow_id)
    try:
        act(workflow=workflow, by=signed_in(request))
        messages.success(request, words)
    except (DraftProblem, Problem) as problem:
        messages.error(request, str(problem))
    return redirect("workflow-detail", workflow.pk)


@require_POST
def workflow_stop_view(request: HttpRequest, workflow_id: str) -> HttpResponse:
    """Stop what runs of a workflow; the steps that wait are not started."""
    return _act(request, workflow_id, workflow_stop, "The workflow is stopped.")


@require_POST
def workflow_resume_view(request: HttpRequest, workflow_id: str) -> HttpResponse:
    """Go on with a workflow from its first step that has not succeeded."""
    return _act(request, workflow_id, workflow_resume, "The workflow goes on.")


@require_POST
def workflow_delete_view(request: HttpRequest, workflow_id: str) -> HttpResponse:
    """Take an ended workflow out of the lists."""
    workflow = owned_for(request, Workflow, pk=workflow_id)
    try:
        workflow_delete(workflow=workflow, by=signed_in(request))
    except Problem as problem:
        messages.error(request, problem.detail)
        return redirect("workflow-detail", workflow.pk)
    messages.success(request, f"{workflow.name} is deleted; its jobs stay.")
    return redirect("workflow-list")
