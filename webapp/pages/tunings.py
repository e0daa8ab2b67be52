"""The pages of tunings: a new one with its candidates, the list, one with its trials."""

from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from runners.plans.refusals import DraftProblem
from runners.plans.tuning import TuningOptions
from webapp.accounts.services import (
    may_change,
    membership_of,
    signed_in,
    visible_or_404,
)
from webapp.core.ids import new_ulid
from webapp.core.parameters import reads_query
from webapp.core.problems import Problem
from webapp.jobs.series import series_stop
from webapp.live.stream import live_context, page_or_regions
from webapp.pages.series import series_act, series_page, series_remove
from webapp.plans.models import Plan
from webapp.plans.saving import changeable_plan
from webapp.tunings.form import TuningForm
from webapp.tunings.listing import TuningView, view_of, views_of
from webapp.tunings.models import Tuning
from webapp.tunings.planning import tuning_plan
from webapp.tunings.services import tuning_of, tuning_start

KEY_LENGTH = 64
UNPROCESSABLE = 422


@require_http_methods(["GET", "HEAD", "POST"])
def plan_tune(request: HttpRequest, plan_id: str) -> HttpResponse:
    """Show the candidates of a plan's tuning with a form of its budget, or start it."""
    plan = changeable_plan(request, plan_id)
    if plan.deleted_at is not None:
        raise Http404("This plan is deleted.")
    if request.method != "POST":
        return _new(request, plan, TuningForm(part=TuningOptions()))
    form = TuningForm(request.POST, part=TuningOptions())
    if not form.is_valid():
        return _new(request, plan, form, status=UNPROCESSABLE)
    try:
        tuning = tuning_start(
            team=plan.team,
            by=signed_in(request),
            plan=plan,
            options=form.options,
            idempotency_key=request.POST.get("key", "")[:KEY_LENGTH] or None,
        )
    except (DraftProblem, Problem) as problem:
        form.add_error(None, str(problem))
        return _new(request, plan, form, status=UNPROCESSABLE)
    return redirect("tuning-detail", tuning.pk)


def _new(request: HttpRequest, plan: Plan, form: TuningForm, status: int = 200) -> HttpResponse:
    """Return the page of a new tuning, with the candidates as they are planned."""
    key = request.POST.get("key", "")[:KEY_LENGTH] or new_ulid()
    context: dict[str, Any] = {"plan": plan, "form": form, "key": key}
    try:
        planned = tuning_plan(plan.team, signed_in(request), plan, form.options)
    except (DraftProblem, Problem) as problem:
        context["problem"] = str(problem)
    else:
        tuning = tuning_of(plan.team, signed_in(request), plan, planned)
        context |= {"view": TuningView(tuning, []), "planned": planned}
    return render(request, "tunings/new.html", context, status=status)


@require_GET
@reads_query("page")
def tuning_list(request: HttpRequest) -> HttpResponse:
    """List the teams' tunings, the newest first."""
    rows = Tuning.objects.select_related("owner", "host")
    return series_page(request, rows, views_of, "tunings")


@require_GET
def tuning_detail(request: HttpRequest, tuning_id: str) -> HttpResponse:
    """Show a tuning: what was planned of each candidate, what was measured, and what was found."""
    tuning = visible_or_404(Tuning, request.user, pk=tuning_id)
    may = may_change(membership_of(request.user, tuning.team), tuning)
    context: dict[str, Any] = {
        "view": view_of(tuning),
        "tuning": tuning,
        "may_stop": may and tuning.is_running,
        "may_delete": may and not tuning.is_running,
    }
    context |= live_context(request, ["jobs"])
    return page_or_regions(request, "tunings/detail.html", "tunings/_regions.html", context)


@require_POST
def tuning_stop_view(request: HttpRequest, tuning_id: str) -> HttpResponse:
    """Stop the trial of a tuning that runs; no other is started."""
    words = "The tuning is stopped."
    return series_act(request, Tuning, tuning_id, series_stop, words)


@require_POST
def tuning_delete_view(request: HttpRequest, tuning_id: str) -> HttpResponse:
    """Take an ended tuning out of the list."""
    return series_remove(request, Tuning, tuning_id)
