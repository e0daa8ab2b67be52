"""A person's decision to exclude or include a measurement."""

from typing import Literal

from django.contrib import messages
from django.contrib.auth.models import AnonymousUser, User
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse
from django.views.decorators.http import require_POST

from webapp.accounts.models import Role
from webapp.accounts.roles import has_role
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, InvalidProblem, Problem
from webapp.jobs.calibrate import recalibrate
from webapp.jobs.lookup import load_job
from webapp.jobs.models import Event, Measurement

Decision = Literal["excluded", "included"]
LONGEST_REASON = 200


def measurement_decide(
    *, measurement: Measurement, decision: Decision, reason: str, by: str
) -> None:
    """Exclude a measurement from calibration and accuracy, or include it; recalibrate its host.

    Factors depend only on the included measurements, so reverting a decision restores the
    previous factors bit for bit.

    Raises:
        InvalidProblem: the reason is empty or too long.
        ConflictProblem: the measurement has that state already.
    """
    reason = " ".join(reason.split())
    if not reason:
        raise InvalidProblem("reason", "“Why” is empty; give a reason, such as “a backup ran”.")
    if len(reason) > LONGEST_REASON:
        raise InvalidProblem(
            "reason", f"“Why” has {len(reason)} characters; at most {LONGEST_REASON} are kept."
        )
    is_excluded = decision == "excluded"
    with transaction.atomic():
        current = Measurement.objects.select_for_update(no_key=True).get(pk=measurement.pk)
        if current.is_excluded == is_excluded:
            author_words = (
                f", by {current.decided_by}: {current.decision_reason}"
                if current.decided_by
                else ""
            )
            raise ConflictProblem("decided", f"It is {decision} already{author_words}.")
        Measurement.objects.filter(pk=measurement.pk).update(
            is_excluded=is_excluded,
            decision=decision,
            decision_reason=reason,
            decided_by=by,
            decided_at=now(),
        )
        Event.objects.create(
            at=now(),
            team_id=measurement.job.team_id,
            kind=f"measurement.{decision}",
            subject=measurement.job_id,
            attempt_id=measurement.attempt_id,
            actor=by[:80],
            detail={
                "metric": measurement.metric,
                "host": measurement.host.slug,
                "reason": reason,
                "invalid": current.invalid_reason,
            },
        )
    measurement.refresh_from_db()
    if measurement.job.num_hosts == 1:
        recalibrate(measurement.host, job=measurement.job, cause=decision, actor=by)


def may_decide(
    user: User | AnonymousUser, row: Measurement, decision: Decision | None = None
) -> bool:
    """Return whether a person may exclude or include a measurement.

    Operators of the host's team may. Operators of the job's team may too, except including an
    invalid measurement.
    """
    if has_role(user, row.host.team, Role.OPERATOR):
        return True
    target = decision or ("included" if row.is_excluded else "excluded")
    is_harmless = target == "excluded" or not row.invalid_reason
    return is_harmless and has_role(user, row.job.team, Role.OPERATOR)


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
            "admin of that team can make you one."
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
