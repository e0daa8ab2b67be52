"""A host takes an attempt: exactly one claim ever gets the spec."""

import structlog
from django.db import transaction
from pydantic import SecretStr

from runners.messages import ClaimRequest, RunRequest
from webapp.accounts.secrets import secrets_open
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem
from webapp.core.vault import VaultError
from webapp.hosts.models import Host
from webapp.jobs.host_preflight import details, give_back
from webapp.jobs.models import Attempt, Command, Event, Job, JobState
from webapp.jobs.transitions import transition

log = structlog.get_logger(__name__)


def attempt_claim(*, attempt_id: str, host: Host, request: ClaimRequest) -> RunRequest:
    """Return what the attempt runs, to the one claim that gets it, however often it asks.

    A host whose preflight failed gives the attempt back with its claim.

    Raises:
        ConflictProblem: another claim has it, it is not to be run any more, or it was given back.
    """
    if give_back(attempt_id=attempt_id, host=host, request=request):
        raise ConflictProblem("preflight_failed", "The attempt was given back to the queue.")
    with transaction.atomic():
        job = Job.objects.select_for_update().filter(attempts=attempt_id, attempts__host=host)
        locked = job.first()
        if locked is None or not _take(attempt_id, request):
            return _repeat(attempt_id, host, request)
        attempt = Attempt.objects.get(pk=attempt_id)
        attempt.facts = host.facts
        attempt.save(update_fields=["facts"])
        actor = f"host:{host.slug}"
        detail = details(request.checks)
        transition(locked, JobState.STARTING, actor=actor, attempt=attempt, detail=detail)
        Command.objects.filter(attempt=attempt, kind="start").update(state="acked")
        return _run_request(locked, attempt)


def _take(attempt_id: str, request: ClaimRequest) -> bool:
    """Claim with one guarded UPDATE: two claims can never both find an unclaimed row."""
    unclaimed = Attempt.objects.filter(
        pk=attempt_id,
        fence=request.fence,
        claimed_at=None,
        job__current_attempt=attempt_id,
        job__state__in=[JobState.PREFLIGHT, JobState.STARTING],
    )
    rows = unclaimed.update(claimed_at=now(), claim_id=request.claim_id, boot_id=request.boot_id)
    return bool(rows)


def _repeat(attempt_id: str, host: Host, request: ClaimRequest) -> RunRequest:
    """Answer a claim whose reply was lost again, and refuse every other one."""
    attempt = (
        Attempt.objects.filter(pk=attempt_id, host=host, fence=request.fence)
        .select_related("job")
        .first()
    )
    if attempt is None:
        raise ConflictProblem("unknown_attempt", "This host has no such attempt with this fence.")
    if attempt.claim_id != request.claim_id or not attempt.claim_id:
        raise ConflictProblem(
            "not_claimable", "The attempt was claimed by another folder or is not to be run."
        )
    return _run_request(attempt.job, attempt)


def _run_request(job: Job, attempt: Attempt) -> RunRequest:
    return RunRequest.model_validate(
        {
            "attempt_id": attempt.pk,
            "job_id": job.pk,
            "number": attempt.number,
            "fence": attempt.fence,
            "spec": job.spec,
            "devices": [
                {"kind": held.device.kind, "index": held.device.index, "uuid": held.device.uuid}
                for held in attempt.allocations.select_related("device")
            ],
            "max_duration_seconds": job.max_duration_seconds,
        }
    )


def attempt_secrets(run: RunRequest) -> dict[str, SecretStr]:
    """Return the values that a claimed attempt was promised, and note that they were given.

    What does not open is left out: the host then refuses the attempt by the secret's name.
    """
    if not run.spec.secrets:
        return {}
    job = Job.objects.get(pk=run.job_id)
    try:
        opened = secrets_open(team_id=job.team_id, names=run.spec.secrets)
    except VaultError as error:
        log.warning("secrets do not open", job=job.pk, why=str(error))
        return {}
    Event.objects.get_or_create(  # a claim whose reply was lost is answered again
        kind="job.secrets",
        subject=job.pk,
        attempt_id=run.attempt_id,
        defaults={
            "at": now(),
            "team_id": job.team_id,
            "actor": "system:claims",
            "detail": {"names": sorted(opened)},
        },
    )
    return {name: SecretStr(value) for name, value in opened.items()}
