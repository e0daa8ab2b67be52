"""The host's preflight before a claim: the requested checks and the effect of their result."""

from collections.abc import Sequence
from typing import Any

from django.db import transaction
from django.db.models import Q

from runners.engines import environment_of
from runners.jobspec.compress import LIBRARY_DTYPES
from runners.jobspec.serve import EngineOptions
from runners.messages import ClaimRequest, Needs, PreflightCheck
from webapp.hosts.models import Host
from webapp.jobs.allocation import send_back
from webapp.jobs.models import Allocation, Attempt, Job, JobState

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
