"""What a host's finished jobs say about it: the planner's factors for that host.

Every figure is predicted again without the host's factors, so that factors never compound,
and with today's planner, so that a better formula mends old measurements too.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import structlog
from pydantic import TypeAdapter, ValidationError

from planner.calibration import calibrate_host, measurements_of
from planner.errors import PlannerError
from planner.specs.calibration import HostCalibration
from planner.specs.calibration import Measurement as PlannerMeasurement
from planner.specs.estimate import EstimateRequest
from planner.specs.plan import PlanRequest
from planner.specs.strategy import Strategy
from planner.specs.workload import GenerateWorkload, TrainWorkload, Workload
from runners.jobspec import (
    BenchmarkSpec,
    CompressSpec,
    DemoPrompts,
    GenerateSpec,
    ModelSpec,
    TrainSpec,
)
from webapp.hosts.models import Host
from webapp.jobs.as_read import reads_full_rows, rows_read
from webapp.jobs.models import Job, JobState, Measurement

log = structlog.get_logger(__name__)
MAX_JOBS = 50
WHOLE_BATCHES = ("given", "sorted")
PLANNER_NAMES = {
    "ttft_seconds": "ttft_seconds",
    "tpot_seconds": "tpot_seconds",
    "step_seconds": "step_seconds",
    "peak_memory_bytes": "per_device_peak_bytes",
}
_SPEC: TypeAdapter[ModelSpec] = TypeAdapter(ModelSpec)


class Question(NamedTuple):
    """One thing that a job measured, as the planner would be asked about it."""

    request: EstimateRequest
    prefix: str = ""
    metrics: Collection[str] = tuple(PLANNER_NAMES)


def recalibrate(host: Host) -> HostCalibration:
    """Compute the host's factors from its latest jobs, store them and return them."""
    calibration = calibrate_host(
        [found for job in _latest_jobs(host) for found in _measurements(job, host)]
    )
    Host.objects.filter(pk=host.pk).update(calibration=calibration.model_dump(mode="json"))
    return calibration


def _latest_jobs(host: Host) -> list[Job]:
    """Return what the host ran alone: several hosts together measure none of them."""
    jobs = Job.objects.filter(host=host, num_hosts=1, state=JobState.SUCCEEDED)
    jobs = jobs.exclude(plan_request={})
    return list(jobs.order_by("-ended_at")[:MAX_JOBS])


def _measurements(job: Job, host: Host) -> list[PlannerMeasurement]:
    measured = _included(job)
    try:
        return [
            found
            for question in questions_of(job)
            for found in measurements_of(
                question.request,
                _by_planner_names(measured, question),
                host=host.slug,
                measured_at=job.ended_at.date().isoformat() if job.ended_at else None,
                job=job.pk,
            )
        ]
    except (PlannerError, ValidationError) as error:
        log.warning("job calibrates nothing", job=job.pk, why=str(error))
        return []


def _included(job: Job) -> dict[str, float]:
    """Return what the job measured, without figures that an operator excluded."""
    excluded = set(
        Measurement.objects.filter(job=job, is_excluded=True).values_list("metric", flat=True)
    )
    measured = job.result.get("measured") or {}
    return {name: value for name, value in measured.items() if name not in excluded}


def _by_planner_names(measured: Mapping[str, float], question: Question) -> dict[str, float]:
    return {
        PLANNER_NAMES[ours]: measured[question.prefix + ours]
        for ours in question.metrics
        if question.prefix + ours in measured
    }


def questions_of(job: Job) -> Iterator[Question]:
    """Yield what the planner would be asked about each phase that the job measured."""
    request = PlanRequest.model_validate(job.plan_request)
    strategy = Strategy.model_validate((job.estimate or {}).get("strategy") or {})
    spec = _SPEC.validate_python(job.spec)
    if isinstance(spec, BenchmarkSpec):
        if spec.load is None:  # else who asks decides the figures as much as the host
            yield Question(_ask(request, _generation(spec, spec.batch_size), strategy))
    elif isinstance(spec, TrainSpec | GenerateSpec) and not _holds_otherwise(spec):
        if is_as_planned(spec):
            yield from _as_it_ran(job, spec, request, strategy)
    elif isinstance(spec, CompressSpec):
        for prefix, dtype in spec.foreseen:
            stored = Strategy.model_validate({"weight_dtype": dtype})
            yield Question(_ask(request, _generation(spec, 1), stored), prefix)


def _as_it_ran(
    job: Job, spec: TrainSpec | GenerateSpec, request: PlanRequest, strategy: Strategy
) -> Iterator[Question]:
    """Yield what the planner would be asked about a training's rows, or about a pile."""
    workload = request.workload
    if not isinstance(spec, TrainSpec) or reads_full_rows(spec):
        yield Question(_ask(request, workload, strategy))
        return
    rows = rows_read(spec, job.result.get("measured") or {})
    if rows is None or not isinstance(workload, TrainWorkload):
        return
    # The longest row makes the peak of a training on rows of several lengths; nobody knows it.
    is_even = spec.samples.rows == "packed"
    metrics = PLANNER_NAMES if is_even else PLANNER_NAMES.keys() - {"peak_memory_bytes"}
    yield Question(_ask(request, rows.instead_of(workload), strategy), metrics=tuple(metrics))


def is_as_planned(spec: TrainSpec | GenerateSpec) -> bool:
    """Return whether the job did what the plan costs, if need be of rows as they turned out.

    A real pile's lengths differ. Of a training, the planner knows no activations on disk, no
    classes of whole samples, and no ranks that share a processor.
    """
    if isinstance(spec, TrainSpec):
        is_text = spec.objective == "next_token"
        is_alone = spec.parallel.processes_per_host == 1
        return spec.activation_offload != "disk" and is_text and is_alone
    prompts = spec.prompts
    return (
        isinstance(prompts, DemoPrompts)
        and prompts.shortest is None
        and prompts.count % spec.batch_size == 0
        and not spec.stop_at_end
        and spec.batching in WHOLE_BATCHES
        and spec.kv_cache == "plain"
        and not spec.compiled_step
        and spec.speculation is None
        and spec.offload is None
        and spec.split is None
        and not spec.adapters
    )


def _generation(spec: BenchmarkSpec | CompressSpec, batch_size: int) -> GenerateWorkload:
    return GenerateWorkload(
        batch_size=batch_size, input_tokens=spec.prompt_tokens, output_tokens=spec.output_tokens
    )


def _ask(request: PlanRequest, workload: Workload, strategy: Strategy) -> EstimateRequest:
    fields: dict[str, Any] = {
        "model": request.model,
        "cluster": request.cluster,
        "workload": workload,
        "strategy": strategy,
        "engine": request.engine,
    }
    return EstimateRequest(**fields)


def _holds_otherwise(spec: TrainSpec | GenerateSpec) -> bool:
    """Return whether a training keeps moments elsewhere without need, or rounds as it learns."""
    if isinstance(spec, GenerateSpec):
        return False
    is_rounded = spec.quantized is not None and spec.quantized.method == "qat"
    return is_rounded or spec.optimizer_offload == "disk"
