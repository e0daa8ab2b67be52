"""The limits page with its question form and answer, and the limits tab of a plan."""

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.http import urlencode
from django.views.decorators.http import require_GET

from webapp.accounts.models import Team
from webapp.accounts.roles import chosen_of, memberships_of
from webapp.hosts.models import RUNS_JOBS, Host, HostState
from webapp.limits.questions import (
    BY_KEY,
    QUESTIONS,
    LimitAnswer,
    LimitForm,
    Question,
    shown,
    suited,
)
from webapp.plans.errors import DraftProblem, missing_step
from webapp.plans.models import Plan
from webapp.plans.planning import limit_of
from webapp.wizard.forms import model_ids

UNPROCESSABLE = 422
# Query parameters that links to other questions keep.
KEPT = ("goal", "model", "hardware", "devices_per_node", "nodes", "slo", "weight_dtype")


@require_GET
def limits(request: HttpRequest) -> HttpResponse:
    """Show the form of a question, and the answer after it was submitted."""
    question = BY_KEY.get(request.GET.get("question", ""), QUESTIONS[0])
    team = _team(request)
    form = LimitForm(request.GET.dict(), question, _hosts(team))
    is_submitted = "ask" in request.GET
    answer = _answer(form, team) if is_submitted and form.is_valid() else None
    if not is_submitted:
        form = _unbound(form)
    context: dict[str, Any] = {
        "question": question,
        "form": form,
        "answer": answer,
        "models": model_ids(),
        "tabs": [_tab(each, question, request) for each in QUESTIONS],
    }
    part = "limits/region.html" if "HX-Request" in request.headers else "limits/page.html"
    status = UNPROCESSABLE if is_submitted and answer is None else 200
    return render(request, part, context, status=200 if part != "limits/page.html" else status)


def _unbound(form: LimitForm) -> LimitForm:
    """Return the form unbound, with its defaults and without errors."""
    form.is_bound, form.initial = False, dict(form.data)
    return form


def _answer(form: LimitForm, team: Team | None) -> LimitAnswer | None:
    """Return the answer, or None after adding the planner's error to the form."""
    draft = form.draft
    plan = Plan(team=team, draft=draft)
    try:
        return shown(limit_of(plan, form.question.key), draft)
    except DraftProblem as problem:
        form.refuse(problem.sentence, problem.field)
        return None


def _team(request: HttpRequest) -> Team | None:
    membership = chosen_of(request, memberships_of(request.user))
    return membership.team if membership else None


def _hosts(team: Team | None) -> list[Host]:
    """Return the team's ready hosts."""
    if team is None:
        return []
    ready = Host.objects.filter(team=team, kind__in=RUNS_JOBS, state=HostState.READY)
    return list(ready.order_by("created_at"))


def _tab(each: Question, current: Question, request: HttpRequest) -> dict[str, Any]:
    parameters = {name: request.GET[name] for name in KEPT if name in request.GET}
    url = f"{reverse('limits')}?{urlencode({'question': each.key, **parameters})}"
    return {"url": url, "name": each.name, "is_current": each is current}


def plan_panel(plan: Plan, asked: str) -> dict[str, Any]:
    """Return the context of a plan's limits tab: applicable questions, and one answer."""
    if missing_step(plan.draft):
        return {"questions": (), "limit_problem": ""}
    questions = suited(plan.draft["goal"]["goal"])
    chosen = next((each for each in questions if each.key == asked), None)
    panel: dict[str, Any] = {"questions": questions, "question": chosen}
    if chosen is None:
        return panel
    try:
        return {**panel, "limit": shown(limit_of(plan, chosen.key), plan.draft)}
    except DraftProblem as problem:
        return {**panel, "limit_problem": problem.sentence}
