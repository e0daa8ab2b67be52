"""Operations of scripts on plans: exports for other tools, and limits such as context length."""

from typing import Any

from django.http import HttpRequest
from ninja import Router, Schema

from planner.errors import PlannerError
from planner.specs.plan import InverseQuestion, PlanAnswer
from webapp.accounts.roles import visible_or_404
from webapp.api.auth import PersonAuth
from webapp.api.problems import REFUSALS
from webapp.core.problems import InvalidProblem, NotFoundProblem
from webapp.plans.errors import DraftProblem
from webapp.plans.exporting import export_plan, exports_of
from webapp.plans.models import Plan
from webapp.plans.planning import current_answer, limit_of

router = Router(tags=["plans"], auth=PersonAuth())


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


@router.get("/{plan_id}/exports", response={200: PlanFormats, **REFUSALS})
def formats(request: HttpRequest, plan_id: str) -> PlanFormats:
    """Return the formats that a plan can be exported to."""
    plan = visible_or_404(Plan, request.user, pk=plan_id)
    exports = exports_of(plan, _answer(plan))
    fields = FormatReply.model_fields
    listed = [
        FormatReply(**{name: getattr(export, name) for name in fields}) for export in exports
    ]
    return PlanFormats(plan=plan.pk, formats=listed)


@router.get("/{plan_id}/exports/{key}", response={200: ExportReply, **REFUSALS})
def exported(request: HttpRequest, plan_id: str, key: str) -> ExportReply:
    """Return a plan in one format, with its notes and the script that measures it."""
    plan = visible_or_404(Plan, request.user, pk=plan_id)
    try:
        export = export_plan(plan, _answer(plan), key)
    except PlannerError as error:
        raise NotFoundProblem("no_export", error.message) from error
    return ExportReply(**{name: getattr(export, name) for name in ExportReply.model_fields})


@router.get("/{plan_id}/limits/{question}", response={200: dict[str, Any], **REFUSALS})
def limit(request: HttpRequest, plan_id: str, question: InverseQuestion) -> dict[str, Any]:
    """Return a limit of a plan, such as ``longest_context`` or ``most_users``."""
    plan = visible_or_404(Plan, request.user, pk=plan_id)
    try:
        return limit_of(plan, question).model_dump(mode="json")
    except DraftProblem as problem:
        raise InvalidProblem("limit", str(problem)) from problem
