"""The pages of workflows: the list, one workflow with its steps; stop, resume and delete."""

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_GET, require_POST

from webapp.accounts.services import (
    may_change,
    membership_of,
    visible_or_404,
)
from webapp.accounts.sign_in import session_secret_of
from webapp.core.parameters import reads_query
from webapp.jobs.series import SeriesState
from webapp.live.stream import live_context, page_or_regions
from webapp.pages.series import series_act, series_page, series_remove
from webapp.wizard.documents import yaml_of
from webapp.workflows.listing import WorkflowView, compared, view_of, views_of
from webapp.workflows.models import Workflow
from webapp.workflows.services import workflow_resume, workflow_stop

WORKFLOW_KEYS = "workflow-keys"  # session key: workflow id -> its endpoint's key, until shown


@require_GET
@reads_query("page")
def workflow_list(request: HttpRequest) -> HttpResponse:
    """List the teams' workflows, the newest first."""
    rows = Workflow.objects.select_related("owner")
    return series_page(request, rows, views_of, "workflows")


@require_GET
def workflow_detail(request: HttpRequest, workflow_id: str) -> HttpResponse:
    """Show a workflow: what was planned, how far it is, and what each step measured."""
    workflow = visible_or_404(Workflow, request.user, pk=workflow_id)
    view = view_of(workflow)
    key = session_secret_of(request, WORKFLOW_KEYS, workflow.pk)
    if key:
        del request.session[WORKFLOW_KEYS]
    membership = membership_of(request.user, workflow.team)
    may = may_change(membership, workflow)
    context: dict[str, Any] = {
        "view": view,
        "workflow": workflow,
        "tables": _tables(view),
        "endpoint_key": key,
        "may_stop": may and workflow.is_running,
        "may_delete": may and not workflow.is_running,
        "may_resume": may and workflow.state in {SeriesState.FAILED, SeriesState.STOPPED},
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


@require_POST
def workflow_stop_view(request: HttpRequest, workflow_id: str) -> HttpResponse:
    """Stop what runs of a workflow; the steps that wait are not started."""
    return series_act(request, Workflow, workflow_id, workflow_stop, "The workflow is stopped.")


@require_POST
def workflow_resume_view(request: HttpRequest, workflow_id: str) -> HttpResponse:
    """Go on with a workflow from its first step that has not succeeded."""
    return series_act(request, Workflow, workflow_id, workflow_resume, "The workflow goes on.")


@require_POST
def workflow_delete_view(request: HttpRequest, workflow_id: str) -> HttpResponse:
    """Take an ended workflow out of the lists."""
    return series_remove(request, Workflow, workflow_id)
