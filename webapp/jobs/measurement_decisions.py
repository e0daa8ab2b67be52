"""A person's decision to exclude or include a measurement."""

from typing import Literal

from django.contrib.auth.models import AnonymousUser, User
from django.db import transaction

from webapp.accounts.models import Role
from webapp.accounts.services import has_role
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, InvalidProblem
from webapp.jobs.calibration import recalibrate
from webapp.jobs.models import Measurement

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
        raise InvalidProblem("reason", "“Reason” is empty; give a reason, such as “a backup ran”.")
    if len(reason) > LONGEST_REASON:
        raise InvalidProblem(
            "reason",
            f"“Reason” has {len(reason)} characters; the limit is {LONGEST_REASON}. Shorten it.",
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
            raise ConflictProblem(
                "decided", f"The measurement is {decision} already{author_words}."
            )
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
