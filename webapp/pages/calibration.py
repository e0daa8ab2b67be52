"""The calibration section of a job's page, and a person's decision about a measurement."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from django.contrib import messages
from django.contrib.auth.models import AnonymousUser, User
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse
from django.views.decorators.http import require_POST

from webapp.accounts.models import Role
from webapp.accounts.services import has_role
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.display import OPERATOR_WORDS
from webapp.core.problems import ConflictProblem, InvalidProblem, Problem
from webapp.jobs.calibration import recalibrate
from webapp.jobs.lookup import load_job
from webapp.jobs.measured_figures import definition_for
from webapp.jobs.models import FINAL_STATES, CalibrationChange, Job, JobState, Measurement

# The calibration section of a job's page: changed factors, or why none changed.


ORIGINAL = "original_"
PHASE_WORDS = {"train_step": "the training step", "memory": "peak memory"}


@dataclass(frozen=True)
class FactorMove:
    """A calibration factor of a host before and after a change."""

    name: str
    before: str
    after: str
    num_runs: int


@dataclass(frozen=True)
class FactorDecision:
    """A later decision on one of the job's figures, and its effect on the factors."""

    change: CalibrationChange
    moves: tuple[FactorMove, ...]


@dataclass(frozen=True)
class TaughtRow:
    """A measured figure of the job: whether it counts, and why not."""

    row: Measurement
    label: str
    state: str  # counts, left out, held back
    why: str


@dataclass(frozen=True)
class CalibrationEffect:
    """The effect of one run on its host's calibration."""

    host: str
    moves: tuple[FactorMove, ...]
    why: str  # why no factor changed
    decisions: tuple[FactorDecision, ...]
    rows: tuple[TaughtRow, ...]

    @property
    def reasons(self) -> list[str]:
        """Return the distinct reasons of excluded figures, without a repetition of ``why``."""
        reasons_found = [each.why for each in self.rows if each.state != "counts" and each.why]
        return [why for why in dict.fromkeys(reasons_found) if self.moves or why != self.why]

    @property
    def has_left_out(self) -> bool:
        """Return whether a figure does not count."""
        return any(each.state != "counts" for each in self.rows)


def calibration_effect_of(job: Job) -> CalibrationEffect | None:
    """Return a job's effect on calibration; None before its end or without measurements."""
    if job.state not in FINAL_STATES or job.host is None:
        return None
    rows = list(Measurement.objects.filter(job=job))
    changes = list(CalibrationChange.objects.filter(job=job))
    if not rows and not changes:
        return None
    first = next((each for each in changes if each.cause == "run"), None)
    return CalibrationEffect(
        host=job.host.name,
        moves=moves_of(first) if first else (),
        why=_why(job, first),
        decisions=tuple(
            FactorDecision(each, moves_of(each)) for each in changes if each.cause != "run"
        ),
        rows=tuple(rows_of(rows)),
    )


def _why(job: Job, change: CalibrationChange | None) -> str:
    if job.num_hosts > 1:
        return f"The job ran on {job.num_hosts} hosts, so its measurements calibrate none of them."
    if job.state != JobState.SUCCEEDED:
        return "The job did not succeed."
    return change.why if change else ""


def moves_of(change: CalibrationChange) -> tuple[FactorMove, ...]:
    """Return the factors that a change moved, sorted by operator class."""
    names = sorted({*change.before, *change.after})
    return tuple(
        move
        for name in names
        if (move := _move(name, change.before.get(name), change.after.get(name)))
    )


def _move(
    name: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> FactorMove | None:
    old = before["factor"] if before else 1.0
    new = after["factor"] if after else 1.0
    if old == new:
        return None
    digits = next(
        (digits for digits in range(2, 5) if f"{old:.{digits}f}" != f"{new:.{digits}f}"), 5
    )
    num_runs = after["n"] if after else 0
    words = OPERATOR_WORDS.get(name, name)
    phases = [PHASE_WORDS.get(phase, phase) for phase in (after or {}).get("phases") or ()]
    named = f"{words}, by {' and '.join(phases)}" if phases else words
    return FactorMove(named, f"{old:.{digits}f}", f"{new:.{digits}f}", num_runs)


def _row(row: Measurement) -> TaughtRow:
    original = row.metric.startswith(ORIGINAL)
    metric = row.metric.removeprefix(ORIGINAL)
    label = definition_for(row.job, metric).label
    label = f"{label}, before" if original else label
    if row.is_excluded:
        decision = f"Excluded by {row.decided_by}: {row.decision_reason}"
        return TaughtRow(
            row, label, "left out", decision if row.decided_by else row.invalid_reason
        )
    if row.held_back:
        return TaughtRow(row, label, "held back", row.held_back.capitalize() + ".")
    if row.decision == "included":
        decision = f"Included by {row.decided_by}: {row.decision_reason}"
        return TaughtRow(row, label, "counts", f"{decision}. {row.invalid_reason}".strip())
    return TaughtRow(row, label, "counts", "")


def rows_of(rows: Iterable[Measurement]) -> list[TaughtRow]:
    """Return display rows for measurements: label, whether each counts, and why not."""
    return [_row(row) for row in rows]


# A person's decision to exclude or include a measurement.


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
