"""Upload of a training data file within the wizard."""

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from webapp.datasets.views import taken
from webapp.plans.access import changeable_plan, signed_in
from webapp.plans.models import Plan
from webapp.plans.saving import TRIES, PlanChangedError, draft_of
from webapp.wizard.drafts import proposals_fill
from webapp.wizard.pages import compute_quietly
from webapp.wizard.workload_forms import TRAINING_FORMS


@require_POST
def plan_upload(request: HttpRequest, plan_id: str) -> HttpResponse:
    """Store the file, choose it in both training goals of the plan, and return to the step."""
    plan = changeable_plan(request, plan_id)
    stored = taken(request, plan.team)
    if isinstance(stored, HttpResponse):
        return stored
    if stored is not None:
        if not plan.is_draft:
            plan = draft_of(plan, signed_in(request))
        _choose(plan, stored.pk)
        messages.success(
            request, f"{stored.name} is here and chosen: {stored.num_records:,} records."
        )
    return redirect("plan-step", plan.pk, "workload")


def _choose(plan: Plan, dataset: str) -> None:
    """Choose an upload in the draft's training goals; retry after a concurrent write."""
    for _ in range(TRIES):
        proposals_fill(plan)
        for goal in sorted(TRAINING_FORMS):
            plan.draft["workload"][goal] |= {"data_source": "upload", "dataset": dataset}
        plan.draft["is_touched"] = True
        try:
            return compute_quietly(plan)
        except PlanChangedError:
            plan.refresh_from_db()
    raise PlanChangedError(plan)
