"""Plans: the list, a plan's page with its tabs, launching and deleting."""

import json
from typing import Any

from django.contrib import messages
from django.core.paginator import Paginator
from django.db.models import Count, Q
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_POST

from planner.specs.plan import PlanAnswer
from webapp.accounts.roles import visible_or_404
from webapp.core.problems import Problem
from webapp.jobs.endpoints import hashes_of, keep_for_session, new_key
from webapp.limits.views import plan_panel
from webapp.plans.access import changeable_plan, signed_in
from webapp.plans.alternatives import (
    columns_for,
    comparison,
    frontier_of,
    inapplicable,
    rejections,
)
from webapp.plans.completeness import missing_step
from webapp.plans.errors import DraftProblem
from webapp.plans.explanation import explain, main_lines
from webapp.plans.exporting import exports_of, file_of
from webapp.plans.history import jobs_of, measured_of
from webapp.plans.launching import launch_of, plan_launch
from webapp.plans.measuring import measuring_of
from webapp.plans.models import Plan, PlanState
from webapp.plans.planning import current_answer, is_outdated, plan_compute, plan_keep
from webapp.plans.serving import endpoint_wish_of
from webapp.plans.verdict import problem_verdict, suggestion_chips, verdict_of
from webapp.plans.wishes import wish_of
from webapp.plans.words import workload_words

PAGE_SIZE = 50
KEY_LENGTH = 64
MAX_SECRETS = 16
SHOWN_REJECTIONS = 8
TABS = {
    "summary": "Summary",
    "alternatives": "Alternatives",
    "why": "Why",
    "limits": "Limits",
    "exports": "Exports",
    "history": "History",
}


@require_GET
def plan_list(request: HttpRequest) -> HttpResponse:
    """List the team's plans, newest first; ``q`` looks in their names."""
    query = request.GET.get("q", "").strip()
    plans = Plan.objects.visible_to(request.user).filter(
        Q(state=PlanState.COMPUTED) | Q(owner=request.user.pk)
    )
    if query:
        plans = plans.filter(name__icontains=query)
    plans = plans.select_related("owner").annotate(
        num_jobs=Count("jobs", filter=Q(jobs__deleted_at=None))
    )
    page = Paginator(plans.order_by("-saved_at"), PAGE_SIZE).get_page(request.GET.get("page"))
    rows = [(plan, _row_verdict(plan)) for plan in page]
    return render(request, "plans/list.html", {"page": page, "rows": rows, "filter": query})


def _row_verdict(plan: Plan) -> str:
    """Return a plan's verdict as a state of the chip."""
    if plan.state == PlanState.DRAFT:
        return "draft"
    if not plan.answer:
        return "incomplete"
    return "fits" if plan.answer.get("plans") else "does-not-fit"


@require_GET
def plan_detail(request: HttpRequest, plan_id: str, tab: str = "summary") -> HttpResponse:
    """Show a plan: the answer first, then the figures, then the reasons."""
    if tab not in TABS:
        raise Http404(tab)
    plan = visible_or_404(Plan, request.user, pk=plan_id)
    context: dict[str, Any] = {
        "plan": plan,
        "tab": tab,
        "tabs": [_tab(plan, slug, tab) for slug in TABS],
        "title": plan.name or "Draft plan",
        "work": "" if missing_step(plan.draft) else workload_words(plan.draft),
    }
    try:
        answer = current_answer(plan)
    except DraftProblem as problem:
        context["verdict"] = problem_verdict(problem.sentence)
        return render(request, "plans/detail.html", context)
    url = reverse("plan-tab", args=[plan.pk, "why"])
    context |= {
        "answer": answer,
        "best": answer.plans[0] if answer.plans else None,
        "verdict": verdict_of(answer, plan.draft, url),
        "is_outdated": is_outdated(plan),
        **(_limits(request, plan) if tab == "limits" else PANELS[tab](plan, answer)),
    }
    is_part = tab == "limits" and "HX-Request" in request.headers
    return render(request, "limits/of_plan.html" if is_part else "plans/detail.html", context)


def _tab(plan: Plan, slug: str, current: str) -> dict[str, Any]:
    is_first = slug == "summary"
    url = reverse("plan-detail" if is_first else "plan-tab", args=[plan.pk, slug][: 2 - is_first])
    return {"url": url, "name": TABS[slug], "is_current": slug == current}


def _summary(plan: Plan, answer: PlanAnswer) -> dict[str, Any]:
    return {
        "frontier": frontier_of(answer, plan.draft),
        "columns": columns_for(answer, plan.draft),
        "comparison": comparison(answer, plan.draft),
        "main_lines": main_lines(answer.plans[0]) if answer.plans else [],
        **_ruled_out(answer),
        "chips": suggestion_chips(answer, plan.draft),
        "slug": "review",
    }


def _alternatives(plan: Plan, answer: PlanAnswer) -> dict[str, Any]:
    return {
        "columns": columns_for(answer, plan.draft),
        "comparison": comparison(answer, plan.draft),
        **_ruled_out(answer),
    }


def _ruled_out(answer: PlanAnswer) -> dict[str, Any]:
    lost = rejections(answer)
    return {
        "rejections": lost[:SHOWN_REJECTIONS],
        "more_rejections": lost[SHOWN_REJECTIONS:],
        "inapplicable": inapplicable(answer),
    }


def _limits(request: HttpRequest, plan: Plan) -> dict[str, Any]:
    return plan_panel(plan, request.GET.get("question", ""))


def _why(_plan: Plan, answer: PlanAnswer) -> dict[str, Any]:
    return {"groups": explain(answer.plans[0]) if answer.plans else []}


def _exports(plan: Plan, answer: PlanAnswer) -> dict[str, Any]:
    """Return what can be copied: the plan for other tools, the question, the job's document."""
    texts = [("question", "The question", "Feed it to python -m planner plan", plan.request)]
    if answer.plans:
        strategy = answer.plans[0].strategy.model_dump(mode="json")
        texts.append(("strategy", "The chosen strategy", "Every gap filled in", strategy))
    try:
        document = launch_of(plan).spec.model_dump(mode="json")
        texts.append(("job", "The job", "The document that the host would run", document))
    except DraftProblem:
        pass
    formats = exports_of(plan, answer)
    return {
        "formats": formats,
        "measure": formats[0].measure if formats else "",
        "exports": [(*text[:3], json.dumps(text[3], indent=2)) for text in texts],
    }


@require_GET
def plan_export(request: HttpRequest, plan_id: str, key: str) -> HttpResponse:
    """Send one export of a plan as a file."""
    plan = visible_or_404(Plan, request.user, pk=plan_id)
    try:
        found = file_of(plan, current_answer(plan), key)
    except DraftProblem as problem:
        raise Http404(str(problem)) from problem
    if found is None:
        raise Http404(key)
    name, text = found
    response = HttpResponse(text, content_type="text/plain; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


def _history(plan: Plan, _answer: PlanAnswer) -> dict[str, Any]:
    return {"jobs": jobs_of(plan), "measured": measured_of(plan)}


PANELS = {
    "summary": _summary,
    "alternatives": _alternatives,
    "why": _why,
    "exports": _exports,
    "history": _history,
}


@require_POST
def plan_launch_view(request: HttpRequest, plan_id: str) -> HttpResponse:
    """Launch a plan's job and go to its page, or only keep the plan."""
    plan = changeable_plan(request, plan_id)
    name = request.POST.get("name", "")
    if request.POST.get("go") == "keep":
        plan_keep(plan, name)
        messages.success(request, "The plan is saved.")
        return redirect("plan-detail", plan.pk)
    endpoint_key = new_key() if request.POST.get("go") == "endpoint" else ""
    try:
        wish = wish_of(request.POST.dict())
        if endpoint_key:
            asked = endpoint_wish_of(request.POST.dict(), hashes_of(endpoint_key))
            wish = wish._replace(endpoint=asked)
        is_load = request.POST.get("go") == "load"
        wish = wish._replace(measuring=measuring_of(request.POST.dict(), is_load=is_load))
        key = request.POST.get("key", "")[:KEY_LENGTH] or None
        job = plan_launch(
            plan=plan,
            by=signed_in(request),
            name=name,
            idempotency_key=key,
            secrets=request.POST.getlist("secret")[:MAX_SECRETS],
            wish=wish,
        )
    except (DraftProblem, Problem) as problem:
        messages.error(request, str(problem))
        return redirect("plan-step", plan.pk, "review")
    if endpoint_key:
        keep_for_session(request, job, endpoint_key)
    return redirect("job-detail", job.pk)


@require_POST
def plan_compute_view(request: HttpRequest, plan_id: str) -> HttpResponse:
    """Ask the planner again, with today's measurements of the host."""
    plan = changeable_plan(request, plan_id)
    try:
        plan_compute(plan)
        messages.success(request, "Planned again with what is known today.")
    except DraftProblem as problem:
        messages.error(request, str(problem))
    return redirect("plan-detail", plan.pk)


@require_POST
def plan_delete(request: HttpRequest, plan_id: str) -> HttpResponse:
    """Delete a plan; jobs that were launched from it stay."""
    plan = changeable_plan(request, plan_id)
    messages.success(request, f"{plan.name or 'The draft'} is deleted; its jobs stay.")
    plan.delete()
    return redirect("plan-list")
