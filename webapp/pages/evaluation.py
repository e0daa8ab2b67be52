"""Evaluate a model made by a job against the original, or push it to the Hub."""

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.views.decorators.http import require_POST

from webapp.accounts.models import Role
from webapp.accounts.services import has_role, signed_in
from webapp.core.problems import Problem
from webapp.jobs.evaluating import evaluation_submit, tasks_of
from webapp.jobs.publishing import model_publish
from webapp.modelhub.models import TeamModel


@require_POST
def model_evaluate(request: HttpRequest, model_id: str) -> HttpResponse:
    """Queue an evaluation of one of the team's models and show its job."""
    model = get_object_or_404(TeamModel.objects.visible_to(request.user), pk=model_id)
    if not has_role(request.user, model.team, Role.PRACTITIONER):
        raise PermissionDenied("To evaluate a model you need the role Practitioner or higher.")
    try:
        job = evaluation_submit(model=model, by=signed_in(request), tasks=tasks_of(request.POST))
    except Problem as problem:
        messages.warning(request, problem.detail)
        return redirect("model-detail", model.pk)
    return redirect("job-detail", job.pk)


@require_POST
def model_push(request: HttpRequest, model_id: str) -> HttpResponse:
    """Queue the push of one of the team's models to the Hub and show its job."""
    model = get_object_or_404(TeamModel.objects.visible_to(request.user), pk=model_id)
    if not has_role(request.user, model.team, Role.PRACTITIONER):
        raise PermissionDenied("To push a model you need the role Practitioner or higher.")
    try:
        job = model_publish(
            model=model,
            repository=str(request.POST.get("repository", ""))[:250],
            is_private=request.POST.get("visibility") != "public",
            by=signed_in(request),
        )
    except Problem as problem:
        messages.warning(request, problem.detail)
        return redirect("model-detail", model.pk)
    return redirect("job-detail", job.pk)
