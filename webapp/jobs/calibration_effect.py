"""What a job's measurements changed in its host's calibration factors, or why nothing."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from webapp.core.display import OPERATOR_WORDS
from webapp.jobs.measured_figures import definition_for
from webapp.jobs.models import FINAL_STATES, CalibrationChange, Job, JobState, Measurement

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
    refusal: str  # why no figure of the job counts
    decisions: tuple[FactorDecision, ...]
    rows: tuple[TaughtRow, ...]

    @property
    def reasons(self) -> list[str]:
        """Return the distinct reasons of excluded figures, without a repetition of ``why``."""
        reasons_found = [each.why for each in self.rows if each.state != "counts" and each.why]
        return [why for why in dict.fromkeys(reasons_found) if self.moves or why != self.why]

    def why_not(self, metric: str) -> str:
        """Return why a figure of the job does not count; "" if it does."""
        own = [each for each in self.rows if each.row.metric == metric]
        left_out = [each.why for each in own if each.state != "counts"]
        return self.refusal or next(iter(left_out), "")

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
        why=_refusal(job) or (first.why if first else ""),
        refusal=_refusal(job),
        decisions=tuple(
            FactorDecision(each, moves_of(each)) for each in changes if each.cause != "run"
        ),
        rows=tuple(rows_of(rows)),
    )


def _refusal(job: Job) -> str:
    if job.num_hosts > 1:
        return f"The job ran on {job.num_hosts} hosts, so its measurements calibrate none of them."
    if job.state != JobState.SUCCEEDED:
        return "The job did not succeed."
    return ""


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
