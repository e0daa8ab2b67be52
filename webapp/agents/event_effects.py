"""What each kind of event does to its attempt and, if that is current, to its job."""

from collections.abc import Callable, Mapping
from typing import Any

from django.db import transaction

from runners.shared.messages import (
    ArtefactBody,
    EndpointBody,
    ExitRecord,
    LogBody,
    PhaseBody,
    ProgressBody,
    ResultBody,
    RunEvent,
    StartedBody,
)
from webapp.agents.live_messages import LONGEST_PHASE
from webapp.core.clock import now
from webapp.jobs.allocation import allocate_after
from webapp.jobs.gangs import all_started, devices_release, member_ended
from webapp.jobs.models import LIVE_STATES, Artefact, Attempt, Command, Job, JobState
from webapp.jobs.results import store_measurements_and_models
from webapp.jobs.transitions import NO_PROGRESS, final_state, transition

# Kinds that change no state: points, and what ``job_figures`` reads. The others change rows of
# their own, which may need locks beyond those of job and attempt.
ROUTINE = frozenset({"metric", "log", "progress", "phase"})
LONGEST_ETA_SECONDS = 10 * 365 * 86_400.0  # longer values are division artefacts, not estimates
MAX_ARTEFACTS = 200  # of one attempt; pages list them all


class TooManyError(ValueError):
    """An attempt has announced as many things as it may; the text names them."""


def apply_event(attempt: Attempt, event: RunEvent) -> None:
    """Apply one stored event that is not routine.

    Raises:
        TooManyError: the attempt has announced as many artefacts as it may.
        ValidationError: the body does not match the event's kind.
    """
    _HANDLERS[event.kind](attempt, event.body)


def _started(attempt: Attempt, body: dict[str, Any]) -> None:
    StartedBody.model_validate(body)
    Attempt.objects.filter(pk=attempt.pk, started_at=None).update(started_at=now())
    leader = attempt.head
    if all_started(leader):
        transition(attempt.job, JobState.RUNNING, actor=_actor(attempt), attempt=leader)


def job_figures(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the job's fields that a routine event sets: phase or progress; a log line sets none.

    Raises:
        ValidationError: the body does not match the event's kind.
    """
    if kind == "phase":
        phase = PhaseBody.model_validate(body)
        return {"phase": phase.name[:LONGEST_PHASE]} | (NO_PROGRESS if phase.begins_anew else {})
    if kind == "log":
        LogBody.model_validate(body)
        return {}
    progress = ProgressBody.model_validate(body)
    eta = progress.eta_seconds
    return {
        "progress_done": progress.done,
        "progress_total": progress.total,
        "progress_unit": progress.unit[:24],
        "progress_at": now(),
        "eta_seconds": eta if eta is not None and eta < LONGEST_ETA_SECONDS else None,
    }


def job_update(attempt: Attempt, **changes: object) -> None:
    """Update a job's figures if the attempt is its current one and it has not ended."""
    rows = Job.objects.filter(pk=attempt.job_id, current_attempt=attempt.pk, state__in=LIVE_STATES)
    rows.update(**changes)


def _result(attempt: Attempt, body: dict[str, Any]) -> None:
    if isinstance(measured := body.get("measured"), dict):  # null stands for NaN
        body = {
            **body,
            "measured": {k: value for k, value in measured.items() if value is not None},
        }
    result = ResultBody.model_validate(body)
    job_update(attempt, result=result.model_dump(mode="json"))


def _artefact(attempt: Attempt, body: dict[str, Any]) -> None:
    artefact = ArtefactBody.model_validate(body)
    others = Artefact.objects.filter(attempt=attempt).exclude(name=artefact.name)
    if others.count() >= MAX_ARTEFACTS:
        raise TooManyError(f"name: the attempt has {MAX_ARTEFACTS} artefacts, the limit")
    Artefact.objects.update_or_create(
        attempt=attempt,
        name=artefact.name,
        defaults={
            "kind": artefact.kind,
            "total_bytes": artefact.total_bytes,
            "files": artefact.files,
            "sha256": artefact.sha256,
            "facts": artefact.facts,
        },
    )


def _endpoint(_attempt: Attempt, body: dict[str, Any]) -> None:
    EndpointBody.model_validate(body)


def _exited(attempt: Attempt, body: dict[str, Any]) -> None:
    """Store the exit record; end the job if the attempt is its current one."""
    record = ExitRecord.model_validate(body)
    # A supervisor cannot query GPUs: the loads are those of the host's last heartbeat.
    gpus = attempt.host.last_beat.get("gpus") or []
    Attempt.objects.filter(pk=attempt.pk).update(
        exit_record=record.model_dump(mode="json") | ({"gpus": gpus} if gpus else {}),
        ended_at=now(),
    )
    Command.objects.filter(attempt=attempt).exclude(state="dead").update(state="acked")
    devices_release(attempt)
    job: Job = attempt.job
    if job.is_shared_out:
        member_ended(attempt, record)
    elif transition(
        job,
        final_state(record.reason),
        actor=_actor(attempt),
        attempt=attempt,
        reason=record.reason,
        detail={"exit_code": record.exit_code, "signal": record.signal, "by": record.by},
    ):
        store_measurements_and_models(job, attempt)
    transaction.on_commit(lambda: allocate_after(attempt))


def _actor(attempt: Attempt) -> str:
    return f"host:{attempt.host.slug}"


_HANDLERS: Mapping[str, Callable[[Attempt, dict[str, Any]], None]] = {
    "started": _started,
    "result": _result,
    "artefact": _artefact,
    "endpoint": _endpoint,
    "exited": _exited,
}
