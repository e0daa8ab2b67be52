"""The host's own look before it claims: what it is asked to find, and what its answer does."""

from collections.abc import Sequence
from typing import Any

from django.db import transaction
from django.db.models import Q

from runners.compress_options import LIBRARY_DTYPES
from runners.engines import environment_of
from runners.jobspec.engine import EngineOptions
from runners.messages import ClaimRequest
from runners.preflight_messages import Needs, PreflightCheck
from webapp.hosts.models import Host
from webapp.jobs.allocation import send_back
from webapp.jobs.models import Allocation, Attempt, Job, JobState

ON_DISK = frozenset({"folder", "artefact"})  # sources of models that must be on the host


def needs_of(attempt: Attempt) -> Needs:
    """Return what an attempt takes of its host."""
    spec: dict[str, Any] = attempt.job.spec
    peak = attempt.job.prediction.get("peak_memory_bytes") or {}
    model = spec.get("model") or {}
    held = Allocation.objects.filter(attempt=attempt, device__kind="gpu", released_at=None)
    gpus = tuple(held.order_by("device__index").values_list("device__uuid", flat=True))
    return Needs.model_validate(
        {
            "kind": attempt.job.kind,
            "weight_dtype": _dtype(spec),
            "compute_dtype": str(spec.get("compute_dtype") or ""),
            "attention": str(spec.get("attention") or ""),
            "environment": environment_of(spec),
            "memory_bytes": int(peak.get("low") or peak.get("value") or 0),
            "model": model if model.get("source") in ON_DISK else None,
            "gpus": gpus,
            **_divided(spec.get("engine_options") or {}),
            "compiles": _compiles(spec),
            "ports": [port for port in (attempt.master_port, spec.get("port")) if port],
        }
    )


def _compiles(spec: dict[str, Any]) -> bool:
    """Return whether a job builds kernels as it starts."""
    is_asked = spec.get("compiled_step") or spec.get("compiled")
    return bool(is_asked or spec.get("attention") == "flex")


def _divided(options: dict[str, Any]) -> dict[str, Any]:
    """Return what engines take that divide the work: their GPUs, and a way between them."""
    if not options.get("split"):
        return {}
    return {"num_gpus": EngineOptions.model_validate(options).num_devices, "packages": ["nixl"]}


def _dtype(spec: dict[str, Any]) -> str:
    return str(spec.get("weight_dtype") or LIBRARY_DTYPES.get(spec.get("method", ""), ""))


def details(checks: Sequence[PreflightCheck]) -> dict[str, Any]:
    """Return the checks as they stand in an event; nothing where none were made."""
    return {"checks": [check.model_dump(mode="json") for check in checks]} if checks else {}


def only_port_is_taken(request: ClaimRequest) -> bool:
    """Return whether a host is fit but for the port that was reserved on it."""
    return {check.name for check in request.checks if not check.ok} == {"ports"}


def give_back(*, attempt_id: str, host: Host, request: ClaimRequest) -> bool:
    """Send a job back whose host found itself unfit, with every check; False where it is fit.

    The attempt ends: the folder on the host is buried, and the next try has one of its own.
    """
    if all(check.ok for check in request.checks):
        return False
    own = Attempt.objects.filter(pk=attempt_id, host=host, claimed_at__isnull=False)
    if own.filter(Q(leader__isnull=False) | Q(master_port__isnull=False)).exists():
        return False  # it has claimed its part and asks whether the others have too
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
