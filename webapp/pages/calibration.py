"""A person's decision about a measurement, on its job's page."""

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse
from django.views.decorators.http import require_POST

from webapp.core.problems import Problem
from webapp.jobs.lookup import load_job
from webapp.jobs.measurement_decisions import Decision, may_decide, measurement_decide
from webapp.jobs.models import Measurement


@require_POST
def measurement_decide_view(
    request: HttpRequest, job_id: str, measurement_id: int
) -> HttpResponse:
    """Exclude or include a job's measurement, with a reason; ``may_decide`` is required."""
    job = load_job(request, job_id)
    rows = Measurement.objects.select_related("job__team", "host__team")
    row = get_object_or_404(rows, pk=measurement_id, job=job)
    decision: Decision = "excluded" if request.POST.get("decision") == "excluded" else "included"
    if not may_decide(request.user, row, decision):
        raise PermissionDenied(
            f"To say what counts for {row.host.name} you need the role Operator in its team. An "
            "admin of that team can give you the role."
        )
    by = request.user.get_username()
    try:
        measurement_decide(
            measurement=row, decision=decision, reason=request.POST.get("reason", ""), by=by
        )
    except Problem as problem:
        messages.warning(request, problem.detail)
    else:
        sentence = f"The figure is {decision}. {row.host.name} is calibrated again."
        messages.success(request, sentence)
    return redirect(f"{reverse('job-detail', args=[job.pk])}#taught")
