"""A file of training data that is handed over in the middle of a plan."""

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from webapp.datasets.views import taken
from webapp.plans.access import changeable_plan
from webapp.wizard.drafts import proposals_fill
from webapp.wizard.pages import compute_quietly
from webapp.wizard.workload_forms import TRAINING_FORMS


@require_POST
def plan_upload(request: HttpRequest, plan_id: str) -> HttpResponse:
    """Keep the file and choose it in both training goals of the plan; go back to the step."""
    plan = proposals_fill(changeable_plan(request, plan_id))
    stored = taken(request, plan.team)
    if isinstance(stored, HttpResponse):
        return stored
    if stored is not None:
        for goal in sorted(TRAINING_FORMS):
            plan.draft["workload"][goal] |= {"data_source": "upload", "dataset": stored.pk}
        plan.draft["is_touched"] = True
        compute_quietly(plan)
        messages.success(
            request, f"{stored.name} is here and chosen: {stored.num_records:,} records."
        )
    return redirect("plan-step", plan.pk, "workload")
