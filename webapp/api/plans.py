"""What scripts ask about a plan: its exports for other tools, and how far one thing goes."""

from typing import Any

from django.http import HttpRequest
from ninja import Router, Schema

from planner.errors import PlannerError
from planner.specs.inverse import InverseQuestion
from planner.specs.plan import PlanAnswer
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
    """A format that can say the plan, and what it leaves open."""

    key: str
    title: str
    file_name: str
    notes: list[str]


class PlanFormats(Schema):
    """The formats that can say a plan's first answer."""

    plan: str
    formats: list[FormatReply]


class ExportReply(FormatReply):
    """A plan in another tool's words, with the script that measures its claim."""

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
    found = exports_of(plan, _answer(plan))
    fields = FormatReply.model_fields
    listed = [FormatReply(**{name: getattr(one, name) for name in fields}) for one in found]
    return PlanFormats(plan=plan.pk, formats=listed)


@router.get("/{plan_id}/exports/{key}", response={200: ExportReply, **REFUSALS})
def exported(request: HttpRequest, plan_id: str, key: str) -> ExportReply:
    """Return a plan in one format, with its notes and the script that measures it."""
    plan = visible_or_404(Plan, request.user, pk=plan_id)
    try:
        found = export_plan(plan, _answer(plan), key)
    except PlannerError as error:
        raise NotFoundProblem("no_export", error.message) from error
    return ExportReply(**{name: getattr(found, name) for name in ExportReply.model_fields})


@router.get("/{plan_id}/limits/{question}", response={200: dict[str, Any], **REFUSALS})
def limit(request: HttpRequest, plan_id: str, question: InverseQuestion) -> dict[str, Any]:
    """Return how far one thing goes for a plan, such as ``longest_context`` or ``most_users``."""
    plan = visible_or_404(Plan, request.user, pk=plan_id)
    try:
        return limit_of(plan, question).model_dump(mode="json")
    except DraftProblem as problem:
        raise InvalidProblem("limit", str(problem)) from problem
