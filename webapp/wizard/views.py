"""The wizard: each step a page that works as a plain form; htmx only refreshes the rail."""

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from webapp.accounts.models import Role
from webapp.accounts.roles import current_team, require_role, visible_or_404
from webapp.core.units import whole
from webapp.modelhub.models import TeamModel
from webapp.plans.access import changeable_plan, signed_in
from webapp.plans.errors import DraftProblem
from webapp.plans.models import Plan
from webapp.plans.planning import plan_compute, stored_answer
from webapp.plans.questions import draft_shape
from webapp.wizard import pages
from webapp.wizard.defaults import FIRST_STEPS, MODEL_PRESETS
from webapp.wizard.drafts import draft_begin, proposals_fill, suggestion_apply
from webapp.wizard.steps import (
    SLUGS,
    fit_context,
    neighbours,
    options_for,
    pins_form,
    step_form,
    store,
)

UNPROCESSABLE = 422


@require_GET
@require_role(Role.PRACTITIONER)
def plan_new(request: HttpRequest) -> HttpResponse:
    """Begin a draft with working defaults; a preset that says everything opens at its review.

    One that is about a model, without a model, opens at the goal as an empty draft does.
    """
    preset, model = request.GET.get("preset", ""), None
    if wanted := request.GET.get("model"):
        model = visible_or_404(TeamModel, request.user, pk=wanted)
    team, owner = current_team(request), signed_in(request)
    plan = draft_begin(team=team, owner=owner, preset=preset, model=model)
    lacks_model = preset in MODEL_PRESETS and model is None
    step = "goal" if lacks_model else FIRST_STEPS.get(preset, "goal")
    return redirect("plan-step", plan.pk, step)


@require_http_methods(["GET", "POST"])
def plan_step(request: HttpRequest, plan_id: str, step: str) -> HttpResponse:
    """Show one step; a POST saves it and goes on, or shows what is wrong beside its field."""
    if step not in SLUGS:
        raise Http404(step)
    plan = proposals_fill(changeable_plan(request, plan_id))
    if request.method == "GET":
        return render(request, "wizard/step.html", pages.step_page(plan, step))
    if problem_page := _save(request, plan, step):
        return render(request, "wizard/step.html", problem_page, status=UNPROCESSABLE)
    return _go_on(request, plan, step)


def _go_on(request: HttpRequest, plan: Plan, step: str) -> HttpResponse:
    """Redirect to where the pressed button leads."""
    before, after = neighbours(step)
    target = {"back": before, "stay": None}.get(request.POST.get("go", "next"), after)
    return redirect("plan-step", plan.pk, target.slug if target else step)


def _save(request: HttpRequest, plan: Plan, step: str) -> dict[str, object] | None:
    """Store a step and plan anew; return the page with its errors if it is not valid."""
    options = options_for(plan)
    form = step_form(step, plan.draft, options, request.POST, request.FILES)
    if form is None:
        return None
    pins = pins_form(plan.draft, request.POST) if step == "hardware" else None
    if not form.is_valid() or (pins and not pins.is_valid()):
        return pages.step_page(plan, step, form, pins)
    store(step, plan.draft, form.cleaned_data)
    if pins:
        store("pins", plan.draft, pins.cleaned_data)
    if step == "model" and "HX-Request" not in request.headers:
        _fit_context(request, plan)
    pages.compute_quietly(plan)
    return None


def _fit_context(request: HttpRequest, plan: Plan) -> None:
    """Shorten the workloads to what the chosen model reads at once, and say so."""
    shape = draft_shape(plan)
    if shape and fit_context(plan.draft, shape.max_position_embeddings):
        tokens = whole(shape.max_position_embeddings)
        messages.info(
            request, f"This model reads {tokens} tokens at once: workloads were shortened."
        )


@require_http_methods(["GET", "POST"])
def plan_verdict(request: HttpRequest, plan_id: str) -> HttpResponse:
    """Return the rail alone; a POST of a step's form saves it first."""
    step = request.GET.get("step", "")
    if request.method == "POST":
        plan = proposals_fill(changeable_plan(request, plan_id))
        if step not in SLUGS:
            raise Http404(step)
        if problem_page := _save(request, plan, step):
            return render(request, "wizard/rail.html", pages.problem_rail(plan, problem_page))
    else:
        plan = proposals_fill(visible_or_404(Plan, request.user, pk=plan_id))
    return render(request, "wizard/rail.html", pages.rail(plan, step))


@require_POST
def plan_suggestion(request: HttpRequest, plan_id: str) -> HttpResponse:
    """Change the draft as the pressed chip says, plan anew, and go back to the step."""
    plan = proposals_fill(changeable_plan(request, plan_id))
    step = request.POST.get("step", "review")
    answer = stored_answer(plan)
    chosen = request.POST.get("suggestion", "")
    if answer is None or chosen not in map(str, range(len(answer.suggestions))):
        messages.error(
            request, "This suggestion belongs to an older verdict; here is the new one."
        )
    else:
        _apply(request, plan, answer.suggestions[int(chosen)].changes)
    return redirect("plan-step", plan.pk, step if step in SLUGS else "review")


def _apply(request: HttpRequest, plan: Plan, changes: dict[str, object]) -> None:
    if left := suggestion_apply(plan.draft, changes):
        messages.warning(
            request, f"Not changed, as this draft has no such field: {', '.join(left)}."
        )
    try:
        plan_compute(plan)
    except DraftProblem as problem:
        messages.error(request, str(problem))
