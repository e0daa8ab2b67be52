"""Results of a successful job: measurements with their validity, and registered models."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import Q
from pydantic import TypeAdapter

from planner.catalog.models import published_config
from runners.jobspec import (
    ArtefactModel,
    CompressSpec,
    DemoModel,
    ModelSpec,
    RandomModel,
    TrainSpec,
)
from runners.shared.reasons import Reason
from webapp.core.clock import now
from webapp.core.display import clock, counted, percent
from webapp.hosts.machines import holders_among, store_validation_rates, twins_of
from webapp.hosts.models import Device, Host
from webapp.jobs.calibration import PROOF, PROOF_REPORT, recalibrate
from webapp.jobs.models import Allocation, Artefact, Attempt, Job, Measurement
from webapp.jobs.stored_files import free_name
from webapp.modelhub.models import TeamModel, demo_config

# Validity of a run's measurements: evidence of disturbances, and the verdict.
#
# An invalid figure is shown with its reason and calibrates nothing, unless a person includes it.
# Only times are disturbed by other programs; memory figures are always valid.


# With a fifth of the cores taken, a run is up to a quarter slower: as much as predictions
# deviate within a device family (planner.workload.outcome, 0.22).
MOST_TAKEN = 0.2
MOST_TAKEN_WITH_GPU = 0.8  # the processor only feeds the GPU there
MOST_HEAT = 0.05  # of the time
MOST_SECONDS_OFF = 1.0  # clock jump or suspension of the machine
MOST_OVERLAP = 0.05  # of the time, with another job on the same device
LEAST_STEPS = 5  # with fewer steps, one slow step decides the median
LEAST_TOKENS = 8  # generated tokens, for the time per token
STEPPED = frozenset({"train"})
WRITING = frozenset({"benchmark", "generate"})
Evidence = dict[str, Any]


def evidence_of(job: Job, attempt: Attempt) -> Evidence:
    """Return the recorded circumstances of an ended attempt's measurements.

    ``usable_cores`` and ``taken_cores`` are means over the run; ``overlap_ratio`` is the largest
    share of the run during which another job used one of its devices.
    """
    record: Mapping[str, Any] = attempt.exit_record or {}
    conditions = record.get("conditions") or {}
    names = (
        *("usable_cores", "taken_cores", "heat_throttled_ratio"),
        *("clock_jump_seconds", "suspended_seconds"),
    )
    evidence = {name: conditions[name] for name in names if conditions.get(name) is not None}
    allocations = Allocation.objects.filter(attempt=attempt).select_related("device")
    devices = [each.device for each in allocations]
    evidence["has_gpus"] = any(device.kind == "gpu" for device in devices)
    uuids = {device.uuid for device in devices}
    gpus = [gpu for gpu in record.get("gpus") or () if gpu.get("uuid") in uuids]
    evidence["foreign_pids"] = [pid for gpu in gpus for pid in gpu.get("foreign_pids") or ()]
    evidence["slowed_by"] = sorted({why for gpu in gpus for why in gpu.get("slowed_by") or ()})
    if job.kind in STEPPED and job.progress_unit == "steps" and job.progress_done is not None:
        evidence["steps"] = int(job.progress_done)
    if job.kind in WRITING and isinstance(tokens := job.spec.get("output_tokens"), int):
        evidence["tokens"] = tokens
    overlap, name = _overlap(job, attempt)
    return evidence | {"overlap_ratio": overlap, "overlap_job": name}


def _overlap(job: Job, attempt: Attempt) -> tuple[float, str]:
    """Return the largest share of a run that another job used one of its devices, and its name.

    The same device may be reported by two hosts: two agents on one machine. A host of another
    team that merely claims a GPU later (``holders_among``) makes nothing invalid here, and jobs
    of other teams are not named.
    """
    start, end = attempt.started_at, attempt.ended_at or now()
    if start is None or end <= start:
        return 0.0, ""
    devices = list(Device.objects.filter(allocations__attempt=attempt))
    holders = holders_among(twins_of(devices))
    same = {device.pk for device in devices}
    same |= {twin.pk for device in devices for twin in holders.get(device.pk, ())}
    processors = {device.hardware for device in devices if device.kind == "cpu"} - {""}
    own_machine = Q(device__hardware__in=processors, device__host__team=job.team_id)
    others = Allocation.objects.filter(Q(device__in=same) | own_machine, taken_at__lt=end)
    others = others.exclude(attempt__job=job)
    others = others.filter(Q(released_at=None) | Q(released_at__gt=start))
    worst = max(
        (
            (
                _overlap_ratio(each.attempt, start, end),
                each.attempt.job.name if each.attempt.job.team_id == job.team_id else "",
            )
            for each in others_of(others)
        ),
        default=(0.0, ""),
    )
    return worst if worst[0] > 0 else (0.0, "")


def others_of(rows: Any) -> Iterator[Allocation]:  # noqa: ANN401 -- a QuerySet of Allocation
    """Yield allocations of attempts that started, with their jobs."""
    yield from rows.filter(attempt__started_at__isnull=False).select_related("attempt__job")


def _overlap_ratio(other: Attempt, start: datetime, end: datetime) -> float:
    began, ended = max(other.started_at or end, start), min(other.ended_at or end, end)
    return max(0.0, (ended - began) / (end - start))


def invalid_reason(metric: str, evidence: Mapping[str, Any]) -> str:
    """Return why a figure is invalid, as one sentence; "" if it is valid."""
    if metric.endswith("bytes"):
        return ""
    return next(_reasons(metric, evidence), "")


def _reasons(metric: str, evidence: Mapping[str, Any]) -> Iterator[str]:
    yield from _load(evidence)
    yield from _devices(evidence)
    yield from _clocks(evidence)
    steps, tokens = evidence.get("steps"), evidence.get("tokens")
    if steps is not None and steps < LEAST_STEPS:
        yield f"The run has {counted(steps, 'step')}; {LEAST_STEPS} are needed."
    if tokens is not None and tokens < LEAST_TOKENS and not metric.endswith("ttft_seconds"):
        yield f"The run generated {tokens} tokens per prompt; {LEAST_TOKENS} are needed."


def _load(evidence: Mapping[str, Any]) -> Iterator[str]:
    usable_cores, taken_cores = evidence.get("usable_cores"), evidence.get("taken_cores")
    most = MOST_TAKEN_WITH_GPU if evidence.get("has_gpus") else MOST_TAKEN
    if usable_cores and taken_cores is not None and taken_cores / usable_cores > most:
        cores = f"{taken_cores:.1f} of the {usable_cores:g} cores"
        yield f"Other programs used {cores} on average over the run; the limit is {percent(most)}."
    overlap = evidence.get("overlap_ratio") or 0.0
    if overlap > MOST_OVERLAP:
        yield (
            f"{evidence.get('overlap_job') or 'Another job'} ran on the same device for "
            f"{percent(overlap)} of the time."
        )


def _devices(evidence: Mapping[str, Any]) -> Iterator[str]:
    if pids := evidence.get("foreign_pids"):
        named = ", ".join(map(str, pids[:3]))
        yield f"Another program used its GPU when it ended (process {named})."
    heat = evidence.get("heat_throttled_ratio") or 0.0
    if heat > MOST_HEAT:
        yield f"Heat slowed the processor for {percent(heat)} of the time."
    if reasons := evidence.get("slowed_by"):
        yield f"Its GPU was slowed when it ended: {', '.join(reasons)}."


def _clocks(evidence: Mapping[str, Any]) -> Iterator[str]:
    jump, slept = (
        evidence.get("clock_jump_seconds") or 0.0,
        evidence.get("suspended_seconds") or 0.0,
    )
    if jump > MOST_SECONDS_OFF:
        yield f"The host's clock was set by {clock(jump)} during the run."
    if slept > MOST_SECONDS_OFF:
        yield f"The host slept for {clock(slept)} during the run."


# Register the models that a job made with its team.


_SPEC: TypeAdapter[ModelSpec] = TypeAdapter(ModelSpec)
MAX_PARAMETERS = 1e15


def _register(job: Job, attempt: Attempt, artefact: Artefact) -> TeamModel:
    spec = _SPEC.validate_python(job.spec)
    source = _source_model(job, spec)
    measured = job.result.get("measured") or {}
    parameters = measured.get("parameters") or 0.0
    if not 0 < parameters <= MAX_PARAMETERS:  # of no model, and too long for the column
        parameters = source.num_parameters if source else 0
    model, is_new = TeamModel.objects.update_or_create(
        attempt_id=attempt.pk,
        artefact_name=artefact.name,
        defaults={
            "team": job.team,
            "source": "job",
            "config": _config(job, spec, source),
            "num_parameters": int(parameters),
            "host": attempt.host,
            "weight_dtype": _dtype(spec),
            "facts": {**artefact.facts, "measured": measured, "job": job.pk},
        },
    )
    if is_new:
        model.name = free_name(_name(job, spec, source), model)
        model.save(update_fields=["name"])
    return model


def _source_model(job: Job, spec: ModelSpec) -> TeamModel | None:
    """Return the team's model that the job started from, if any."""
    if not isinstance(spec.model, ArtefactModel):
        return None
    return TeamModel.objects.filter(
        team=job.team, attempt_id=spec.model.attempt_id, artefact_name=spec.model.name
    ).first()


def _config(job: Job, spec: ModelSpec, source: TeamModel | None) -> dict[str, Any]:
    """Return the config of the new model: that of the job's source model."""
    if isinstance(spec.model, DemoModel):
        positions = spec.model.max_position_embeddings
        if isinstance(spec, TrainSpec):
            positions = min(positions, spec.sequence_length)
        return {**demo_config(spec.model), "max_position_embeddings": positions}
    if isinstance(spec.model, RandomModel):
        return dict(spec.model.config)
    if source is not None:
        return dict(source.config)
    planned = job.plan_request.get("model")
    if isinstance(planned, str):
        return published_config(planned)
    return planned if isinstance(planned, dict) else {}


def _dtype(spec: ModelSpec) -> str:
    return spec.published_dtype if isinstance(spec, TrainSpec) else spec.weight_dtype


def _name(job: Job, spec: ModelSpec, source: TeamModel | None) -> str:
    base = source.name if source else job.model_name or job.name
    if isinstance(spec, TrainSpec):
        return f"{base}, LoRA {spec.lora.rank}"[:120] if spec.lora else base
    made = spec.title if isinstance(spec, CompressSpec) else spec.weight_dtype
    return f"{base}, {made}"[:120]


# Store a job's measurements with their predictions and validity.


def store_measurements(job: Job, attempt: Attempt, host: Host) -> list[Measurement]:
    """Store one row for each figure that was both predicted and measured, and return them."""
    measured = job.result.get("measured") or {}
    attempt.refresh_from_db(fields=["exit_record", "started_at", "ended_at"])
    evidence = evidence_of(job, attempt)
    rows = [
        Measurement(
            team_id=job.team_id,
            job=job,
            attempt=attempt,
            host=host,
            metric=metric,
            unit=str(prediction.get("unit", "")),
            predicted=prediction["value"],
            predicted_low=prediction.get("low"),
            predicted_high=prediction.get("high"),
            measured=measured[metric],
            ratio=measured[metric] / prediction["value"],
            measured_at=now(),
            validity=evidence,
            invalid_reason=(why := invalid_reason(metric, evidence)[:300]),
            is_excluded=bool(why),
        )
        for metric, prediction in job.prediction.items()
        if metric in measured and prediction.get("value")
    ]
    return Measurement.objects.bulk_create(rows, ignore_conflicts=True)


# Results of a successful job: measurements, calibration and registered models.


def store_measurements_and_models(job: Job, attempt: Attempt) -> None:
    """Store the measurements and models of a successful job; other jobs store nothing.

    Measurements over several hosts are stored with the job, but calibrate none of the hosts.
    """
    if job.reason != Reason.OK:
        return
    host: Host = attempt.host
    job.refresh_from_db()
    store_measurements(job, attempt, host)
    if job.spec.get("objective") != "reward":  # such a model scores answers and makes none
        for artefact in Artefact.objects.filter(attempt=attempt, kind="model"):
            _register(job, attempt, artefact)
    if job.num_hosts == 1:
        transaction.on_commit(lambda: _learn(host, job, attempt), robust=True)


def _learn(host: Host, job: Job, attempt: Attempt) -> None:
    """Store the rates of a validation, by which the planner predicts, then calibrate the host."""
    if job.kind == PROOF:
        report = Artefact.objects.filter(attempt=attempt, name=PROOF_REPORT).first()
        if report is not None:
            store_validation_rates(host, job.pk, report.facts)
    recalibrate(host, job=job, cause="run")
