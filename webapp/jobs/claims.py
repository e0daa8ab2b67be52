"""Claims of attempts by hosts, after the host's preflight: exactly one receives the spec."""

from collections.abc import Sequence
from typing import Any

import structlog
from django.db import transaction
from django.db.models import F, Q
from pydantic import SecretStr

from runners.engines import environment_of
from runners.jobspec.compress import LIBRARY_DTYPES
from runners.jobspec.serve import EngineOptions
from runners.messages import ClaimReply, ClaimRequest, Needs, PreflightCheck, RunRequest
from webapp.accounts.secrets import secrets_open
from webapp.core.clock import now
from webapp.core.problems import BusyProblem, ConflictProblem
from webapp.core.vault import VaultError
from webapp.hosts.epoch import RESTORED, is_restored
from webapp.hosts.models import Host
from webapp.jobs.allocation import send_back
from webapp.jobs.gangs import all_claimed
from webapp.jobs.models import Allocation, Attempt, Command, Event, Job, JobState
from webapp.jobs.reservations import gang_of, place_move
from webapp.jobs.transitions import transition

# The host's preflight before a claim: the requested checks and the effect of their result.


ON_DISK = frozenset({"folder", "artefact"})  # sources of models that must be on the host


def needs_of(attempt: Attempt) -> Needs:
    """Return what an attempt requires of its host."""
    spec: dict[str, Any] = attempt.job.spec
    peak = attempt.job.prediction.get("peak_memory_bytes") or {}
    model = spec.get("model") or {}
    allocations = Allocation.objects.filter(attempt=attempt, device__kind="gpu", released_at=None)
    gpus = tuple(allocations.order_by("device__index").values_list("device__uuid", flat=True))
    return Needs.model_validate(
        {
            "kind": attempt.job.kind,
            "weight_dtype": _dtype(spec),
            "compute_dtype": str(spec.get("compute_dtype") or ""),
            "attention": str(spec.get("attention") or ""),
            "environment": environment_of(spec),
            "memory_bytes": int(peak.get("low") or peak.get("value") or 0),
            "context_tokens": _context(spec),
            "model": model if model.get("source") in ON_DISK else None,
            "gpus": gpus,
            **_disaggregation(spec.get("engine_options") or {}),
            "compiles": _compiles(spec),
            "ports": [port for port in (attempt.master_port, spec.get("port")) if port],
        }
    )


def _context(spec: dict[str, Any]) -> int:
    """Return the tokens of a llama.cpp endpoint's KV cache; 0 if the model's length sets them."""
    if spec.get("engine") != "llamacpp":
        return 0
    per_slot = int(spec.get("max_length") or 0)
    return int(spec.get("kv_cache_tokens") or per_slot * int(spec.get("max_concurrency") or 0))


def _compiles(spec: dict[str, Any]) -> bool:
    """Return whether a job compiles kernels at its start."""
    is_requested = spec.get("compiled_step") or spec.get("compiled")
    return bool(is_requested or spec.get("attention") == "flex")


def _disaggregation(options: dict[str, Any]) -> dict[str, Any]:
    """Return the requirements of disaggregated engines: GPUs and a transfer package."""
    if not options.get("split"):
        return {}
    return {"num_gpus": EngineOptions.model_validate(options).num_devices, "packages": ["nixl"]}


def _dtype(spec: dict[str, Any]) -> str:
    return str(spec.get("weight_dtype") or LIBRARY_DTYPES.get(spec.get("method", ""), ""))


def details(checks: Sequence[PreflightCheck]) -> dict[str, Any]:
    """Return the checks as the detail of an event; empty if there are none."""
    return {"checks": [check.model_dump(mode="json") for check in checks]} if checks else {}


def only_port_is_taken(request: ClaimRequest) -> bool:
    """Return whether the reserved port is the only failed check."""
    return {check.name for check in request.checks if not check.ok} == {"ports"}


def give_back(*, attempt_id: str, host: Host, request: ClaimRequest) -> bool:
    """Requeue a job whose host failed its preflight, with all checks; False if it passed.

    The attempt ends: the host marks its folder as rejected, and the next attempt has a new one.
    """
    if all(check.ok for check in request.checks):
        return False
    claimed = Attempt.objects.filter(pk=attempt_id, host=host, claimed_at__isnull=False)
    if claimed.filter(Q(leader__isnull=False) | Q(master_port__isnull=False)).exists():
        return False  # already claimed; it polls whether the other hosts have too
    with transaction.atomic():
        attempt = (
            Attempt.objects.filter(
                pk=attempt_id, host=host, fence=request.fence, claimed_at=None, ended_at=None
            )
            .select_related("leader")
            .first()
        )
        if attempt is None:
            return True
        job = Job.objects.select_for_update().get(pk=attempt.job_id)
        if job.state == JobState.PREFLIGHT:
            failed = details(request.checks)["checks"]
            leader = attempt.leader or attempt
            send_back(job, failed, attempt=leader, actor=f"host:{host.slug}")
    return True


log = structlog.get_logger(__name__)


def attempt_claim(*, attempt_id: str, host: Host, request: ClaimRequest) -> ClaimReply:
    """Return the run request of an attempt to the claim that owns it; repeated calls are safe.

    A host whose preflight failed returns the attempt with its claim; if only the gang's port is
    in use, another port is reserved. A gang may start once every host has claimed.

    Raises:
        ConflictProblem: another claim has it, it must not run any more, or it was returned.
        BusyProblem: the database is a restored backup.
    """
    if is_restored():
        raise BusyProblem("restored", RESTORED, retry_after_seconds=30)
    if leader := _leader_with_new_port(attempt_id, host, request):
        return ClaimReply(request=_run_request(leader.job, leader), may_start=False)
    if give_back(attempt_id=attempt_id, host=host, request=request):
        raise ConflictProblem("preflight_failed", "The attempt was given back to the queue.")
    with transaction.atomic():
        job = Job.objects.select_for_update().filter(attempts=attempt_id, attempts__host=host)
        locked = job.first()
        if locked is None or not _claim(attempt_id, request):
            return _reply(_claimed_before(attempt_id, host, request))
        attempt = Attempt.objects.get(pk=attempt_id)
        attempt.facts = host.facts
        attempt.save(update_fields=["facts"])
        actor = f"host:{host.slug}"
        detail = details(request.checks)
        leader = attempt.head
        if all_claimed(leader):
            transition(locked, JobState.STARTING, actor=actor, attempt=leader, detail=detail)
        Command.objects.filter(attempt=attempt, kind="start").update(state="acked")
        return _reply(attempt)


def _leader_with_new_port(attempt_id: str, host: Host, request: ClaimRequest) -> Attempt | None:
    """Return a gang's leader after reserving another port, if the first one was in use."""
    if not only_port_is_taken(request):
        return None
    with transaction.atomic():
        Job.objects.select_for_update().filter(attempts=attempt_id).first()
        attempts = Attempt.objects.filter(pk=attempt_id, host=host, fence=request.fence)
        leader = attempts.filter(master_port__isnull=False, ended_at=None).first()
        if leader is None or not place_move(leader=leader):
            return None
        leader.refresh_from_db()
        return leader


def _reply(attempt: Attempt) -> ClaimReply:
    may_start = attempt.job.state != JobState.PREFLIGHT
    return ClaimReply(request=_run_request(attempt.job, attempt), may_start=may_start)


def _claim(attempt_id: str, request: ClaimRequest) -> bool:
    """Claim with one guarded UPDATE, so that two claims cannot both succeed."""
    unclaimed = Attempt.objects.filter(
        pk=attempt_id,
        fence=request.fence,
        claimed_at=None,
        job__state__in=[JobState.PREFLIGHT, JobState.STARTING],
    )
    current = unclaimed.filter(
        Q(job__current_attempt=attempt_id) | Q(job__current_attempt=F("leader"))
    )
    rows = current.update(claimed_at=now(), claim_id=request.claim_id, boot_id=request.boot_id)
    return bool(rows)


def _claimed_before(attempt_id: str, host: Host, request: ClaimRequest) -> Attempt:
    """Return the attempt to the same claim again (its reply was lost); refuse any other claim."""
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
    if attempt.ended_at is not None and attempt.started_at is None and not attempt.exit_record:
        raise ConflictProblem("not_claimable", "The attempt was withdrawn before it started.")
    return attempt


def _run_request(job: Job, attempt: Attempt) -> RunRequest:
    return RunRequest.model_validate(
        {
            "attempt_id": attempt.pk,
            "job_id": job.pk,
            "number": attempt.number,
            "fence": attempt.fence,
            "spec": job.spec,
            "devices": [
                {
                    "kind": allocation.device.kind,
                    "index": allocation.device.index,
                    "uuid": allocation.device.uuid,
                }
                for allocation in attempt.allocations.select_related("device")
            ],
            "max_duration_seconds": job.max_duration_seconds,
            "gang": gang_of(attempt),
        }
    )


def attempt_secrets(run: RunRequest) -> dict[str, SecretStr]:
    """Return the secrets of a claimed attempt, and record that they were handed out.

    Secrets that cannot be decrypted are left out: the host then refuses the attempt and names
    the missing secret.
    """
    if not run.spec.secrets:
        return {}
    job = Job.objects.get(pk=run.job_id)
    try:
        opened = secrets_open(team_id=job.team_id, names=run.spec.secrets)
    except VaultError as error:
        log.warning("secrets do not open", job=job.pk, why=str(error))
        return {}
    Event.objects.get_or_create(  # idempotent: the claim is repeated if its reply was lost
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
