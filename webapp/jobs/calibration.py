"""Calibrate the planner's factors for a host from its finished jobs."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import structlog
from django.db import transaction
from django.db.models import Q
from pydantic import Field, TypeAdapter, ValidationError

from planner.calibration import (
    PHASE_BY_METRIC,
    calibrate_host,
    check_measurements,
    measurements_of,
)
from planner.specs.base import PlannerError
from planner.specs.estimate import EstimateRequest, HostCalibration, PlanRequest
from planner.specs.estimate import Measurement as PlannerMeasurement
from planner.specs.workload import GenerateWorkload, Strategy, TrainWorkload, Workload
from runners.jobspec import (
    BenchmarkSpec,
    CompressSpec,
    DemoPrompts,
    GenerateSpec,
    HostText,
    ModelSpec,
    TrainSpec,
)
from runners.jobspec.objectives import OWN_TRAINER
from runners.prove.report import CalibrationTime
from webapp.core.clock import now
from webapp.core.display import percent, quantity
from webapp.core.problems import ConflictProblem, Problem
from webapp.hosts.machines import cluster_for_host
from webapp.hosts.models import Host
from webapp.jobs.models import Artefact, CalibrationChange, Job, JobState, Measurement
from webapp.plans.planning import estimate_as_planned
from webapp.plans.verdict import Value, figure_values

# A training's actual rows, and the plan's prediction for such rows.
#
# A plan assumes that every position of a row is text: token lengths of samples are unknown before
# a job has read them. Separate samples leave padding, up to the longest of a batch.


log = structlog.get_logger(__name__)
FULL = 0.98  # of a plan's positions: smaller differences are not reported
SHOWN = {"step_seconds": ("seconds", "a step"), "tokens_per_second": ("tokens_per_second", "")}
_SPEC: TypeAdapter[ModelSpec] = TypeAdapter(ModelSpec)


class RowsRead(NamedTuple):
    """The mean row of a training: length in positions, and share of padding."""

    length: int
    padding: float

    def instead_of(self, workload: TrainWorkload) -> TrainWorkload:
        """Return a copy of a workload with these rows."""
        changes = {"sequence_length": self.length, "padding_ratio": self.padding or None}
        return workload.model_copy(update=changes)


def reads_full_rows(spec: TrainSpec) -> bool:
    """Return whether every row is a chunk of one long text."""
    return isinstance(spec.data, HostText) and spec.objective == "next_token"


def rows_read(spec: TrainSpec, measured: Mapping[str, float]) -> RowsRead | None:
    """Return a job's actual rows; None if they match the plan or are not reported."""
    steps, tokens = measured.get("steps"), measured.get("tokens")
    padding = measured.get("padding_share")
    if reads_full_rows(spec) or spec.length_schedule or not steps or not tokens:
        return None
    if padding is None or not 0.0 <= padding < 1.0:
        return None
    rows = steps * spec.micro_batch_size * spec.gradient_accumulation_steps
    length = tokens / rows / (1.0 - padding)
    return RowsRead(min(spec.sequence_length, max(1, round(length))), padding)


def as_read(job: Job) -> str:
    """Return the plan's prediction for the rows that a job read, as text, if they differ.

    Empty for a job whose stored request has an outdated format.
    """
    measured = job.result.get("measured") or {}
    if job.kind != "train" or "padding_share" not in measured or not job.plan_request:
        return ""
    try:
        return _row_length_note(job, measured)
    except ValidationError as error:
        log.warning("a job is not planned again", job=job.pk, why=str(error))
        return ""


def _row_length_note(job: Job, measured: Mapping[str, float]) -> str:
    spec, request = _SPEC.validate_python(job.spec), PlanRequest.model_validate(job.plan_request)
    workload = request.workload
    if not isinstance(spec, TrainSpec) or not isinstance(workload, TrainWorkload):
        return ""
    rows = rows_read(spec, measured)
    if rows is None or rows.length * (1.0 - rows.padding) >= FULL * workload.sequence_length:
        return ""
    strategy = Strategy.model_validate((job.estimate or {}).get("strategy") or {})
    estimate = estimate_as_planned(request, rows.instead_of(workload), strategy)
    predictions = [
        _words(figure_values(estimate, name), *SHOWN[name]) for name in SHOWN if estimate
    ]
    if not any(predictions):
        return ""
    return (
        f"The plan takes every row for {workload.sequence_length:,} tokens of text; those of this "
        f"data had {rows.length:,} positions on the average, {percent(rows.padding)} of them "
        f"padding. For such rows it says {' and '.join(filter(None, predictions))}."
    )


def _words(value: Value | None, unit: str, each: str) -> str:
    if value is None:
        return ""
    middle, low, high = value
    text = f"{quantity(middle, unit)} {each}".rstrip()
    return f"{text} ({quantity(low, unit)} to {quantity(high, unit)})" if low and high else text


# Calibrate the planner's factors for a host from its finished jobs.
#
# Every figure is predicted again without the host's factors, so that factors never compound, and
# with the current planner, so that formula changes apply to old measurements too.


MAX_JOBS = 50
MAX_TIMES = 1000  # of one validation; a real one has a few dozen
_TIMES: TypeAdapter[list[CalibrationTime]] = TypeAdapter(
    Annotated[list[CalibrationTime], Field(max_length=MAX_TIMES, fail_fast=True)]
)
PROOF, PROOF_REPORT = "prove", "proof"  # the kind of job, and its artefact
WHOLE_BATCHES = ("given", "sorted")
PLANNER_NAMES = {
    "ttft_seconds": "ttft_seconds",
    "tpot_seconds": "tpot_seconds",
    "step_seconds": "step_seconds",
    "peak_memory_bytes": "per_device_peak_bytes",
}
OUR_NAMES = {theirs: ours for ours, theirs in PLANNER_NAMES.items()}
TRIES = 5


class Question(NamedTuple):
    """A planner request that corresponds to one measured phase of a job."""

    request: EstimateRequest
    prefix: str = ""
    metrics: Collection[str] = tuple(PLANNER_NAMES)


class AttributedMeasurement(NamedTuple):
    """A job's figure as a planner measurement, with the name of its row."""

    job: Job
    name: str
    measurement: PlannerMeasurement


def recalibrate(
    host: Host, *, job: Job | None = None, cause: str = "", actor: str = "system:calibration"
) -> HostCalibration:
    """Compute the host's factors from its latest jobs, store them and return them.

    If measurements change meanwhile, it starts again, so that the stored factors always match the
    latest measurements. With ``cause`` it records the change caused by ``job``.
    """
    for _ in range(TRIES):
        jobs = _latest_jobs(host)
        inputs = _inputs(jobs)
        learned = [each for past_job in jobs for each in attributed_measurements(past_job, host)]
        checks = check_measurements([each.measurement for each in learned])
        calibration = calibrate_host([each.measurement for each in learned])
        with transaction.atomic():
            locked = Host.objects.select_for_update(no_key=True).only("calibration")
            before = locked.get(pk=host.pk).calibration.get("factors") or {}
            if _inputs(_latest_jobs(host)) != inputs:
                continue
            after = calibration.model_dump(mode="json")
            Host.objects.filter(pk=host.pk).update(calibration=after)
            held_back = {
                (each.job.pk, each.name): check.held_back
                for each, check in zip(learned, checks, strict=True)
                if check.held_back
            }
            _store_held_back(jobs, held_back)
            if job is not None and cause:
                reasons = [why for (pk, _), why in held_back.items() if pk == job.pk]
                is_used = any(each.job.pk == job.pk for each in learned)
                CalibrationChange.objects.create(
                    host=host,
                    job=job,
                    at=now(),
                    cause=cause,
                    actor=actor,
                    before=before,
                    after=_with_phases(after["factors"], learned, job),
                    why=why_unchanged(job, before, after["factors"], reasons, is_asked=is_used)[
                        :400
                    ],
                )
        return calibration
    raise ConflictProblem(
        "busy_calibration", "New measurements keep changing the factors. Try again."
    )


def _with_phases(
    factors: Mapping[str, dict[str, Any]], learned: Sequence[AttributedMeasurement], job: Job
) -> dict[str, Any]:
    """Return factors with the phases that a job's measurements contributed to each."""
    phases: dict[str, set[str]] = {name: set() for name in factors}
    for each in learned:
        measurement = each.measurement
        if each.job.pk == job.pk and measurement.operator_class in phases:
            phases[measurement.operator_class].add(
                PHASE_BY_METRIC.get(measurement.metric, "memory")
            )
    return {name: {**each, "phases": sorted(phases[name])} for name, each in factors.items()}


def _inputs(jobs: list[Job]) -> list[tuple[object, ...]]:
    """Return the identity of the measurements from which factors are computed."""
    rows = Measurement.objects.filter(job__in=[each.pk for each in jobs]).order_by("pk")
    return [*((each.pk,) for each in jobs), *rows.values_list("pk", "is_excluded")]


def _store_held_back(jobs: list[Job], reason_by_row: Mapping[tuple[str, str], str]) -> None:
    """Store the held-back reason on each row where it differs."""
    rows = Measurement.objects.filter(job__in=[each.pk for each in jobs])
    for pk, job_id, metric, stored in rows.values_list("pk", "job_id", "metric", "held_back"):
        why = reason_by_row.get((job_id, metric), "")[:300]
        if why != stored:
            Measurement.objects.filter(pk=pk).update(held_back=why)


def why_unchanged(
    job: Job,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    held: Sequence[str],
    *,
    is_asked: bool,
) -> str:
    """Return why a job changed no factor of its host; "" if one changed."""
    if {name: each["factor"] for name, each in before.items()} != {
        name: each["factor"] for name, each in after.items()
    }:
        return ""
    rows = list(Measurement.objects.filter(job=job))
    if rows and all(row.is_excluded for row in rows if not row.metric.endswith("bytes")):
        invalid = next((row.invalid_reason for row in rows if row.is_excluded), "")
        return invalid or "Its measurements are excluded."
    if held:
        return f"Its measurements are held back: {held[0]}."
    if not is_asked:
        return "It measured no figure that the planner predicts for a single host."
    return "Its measurements agree with the earlier factors."


def _latest_jobs(host: Host) -> list[Job]:
    """Return the latest successful jobs that ran on this host alone."""
    jobs = Job.objects.filter(host=host, num_hosts=1, state=JobState.SUCCEEDED)
    jobs = jobs.exclude(~Q(kind=PROOF) & Q(plan_request={}))
    return list(jobs.order_by("-ended_at", "pk")[:MAX_JOBS])


def attributed_measurements(job: Job, host: Host) -> list[AttributedMeasurement]:
    """Return the included figures of a job, each attributed to one operator class."""
    measured = _included(job)
    try:
        if job.kind == PROOF:
            return list(_of_proof(job, host))
        return [
            AttributedMeasurement(
                job, question.prefix + OUR_NAMES[measurement.metric], measurement
            )
            for question in questions_of(job)
            for measurement in measurements_of(
                question.request,
                {
                    PLANNER_NAMES[name]: measured[question.prefix + name]
                    for name in question.metrics
                    if question.prefix + name in measured
                },
                host=host.slug,
                measured_at=job.ended_at.date().isoformat() if job.ended_at else None,
                job=job.pk,
            )
        ]
    except (PlannerError, ValidationError, Problem) as error:
        log.warning("job calibrates nothing", job=job.pk, why=str(error))
        return []


def _of_proof(job: Job, host: Host) -> Iterator[AttributedMeasurement]:
    """Yield the times of a validation's report, each predicted for the model that it measured."""
    report = Artefact.objects.filter(attempt=job.current_attempt, name=PROOF_REPORT).first()
    cluster = cluster_for_host(host).model_copy(update={"devices_per_node": 1})
    for lesson in _TIMES.validate_python(report.facts.get("lessons") or []) if report else ():
        question = lesson.question.model_dump(exclude={"metric"})
        request = EstimateRequest.model_validate({**question, "cluster": cluster})
        for measurement in measurements_of(
            request,
            {lesson.metric: lesson.seconds},
            host=host.slug,
            measured_at=job.ended_at.date().isoformat() if job.ended_at else None,
            job=job.pk,
        ):
            yield AttributedMeasurement(job, lesson.metric, measurement)


def _included(job: Job) -> dict[str, float]:
    """Return the job's measurements without excluded figures.

    A figure without a row (nothing was predicted for it) follows the job's other figures of its
    kind: times with times, memory with memory.
    """
    rows = dict(Measurement.objects.filter(job=job).values_list("metric", "is_excluded"))
    kinds = {_is_memory(metric) for metric, is_excluded in rows.items() if is_excluded}
    measured = job.result.get("measured") or {}
    return {
        name: value
        for name, value in measured.items()
        if not rows.get(name, _is_memory(name) in kinds)
    }


def _is_memory(metric: str) -> bool:
    return metric.endswith("bytes")


def questions_of(job: Job) -> Iterator[Question]:
    """Yield the planner request of each phase that the job measured."""
    request = PlanRequest.model_validate(job.plan_request)
    strategy = Strategy.model_validate((job.estimate or {}).get("strategy") or {})
    spec = _SPEC.validate_python(job.spec)
    if isinstance(spec, BenchmarkSpec):
        if spec.load is None:  # under load, the clients determine the figures as much as the host
            yield Question(
                _estimate_request(request, _generation(spec, spec.batch_size), strategy)
            )
    elif isinstance(spec, TrainSpec | GenerateSpec) and not _is_unmodelled(spec):
        if is_as_planned(spec):
            yield from _ran_questions(job, spec, request, strategy)
    elif isinstance(spec, CompressSpec):
        for prefix, dtype in spec.predictable_phases:
            stored = Strategy.model_validate({"weight_dtype": dtype})
            yield Question(_estimate_request(request, _generation(spec, 1), stored), prefix)


def _ran_questions(
    job: Job, spec: TrainSpec | GenerateSpec, request: PlanRequest, strategy: Strategy
) -> Iterator[Question]:
    """Yield the planner request for a training's actual rows, or for a batch of prompts."""
    workload = request.workload
    if not isinstance(spec, TrainSpec) or reads_full_rows(spec):
        yield Question(_estimate_request(request, workload, strategy))
        return
    rows = rows_read(spec, job.result.get("measured") or {})
    if rows is None or not isinstance(workload, TrainWorkload):
        return
    # With rows of several lengths the longest row sets the peak; its length is unknown.
    is_even = spec.samples.rows == "packed"
    metrics = PLANNER_NAMES if is_even else PLANNER_NAMES.keys() - {"peak_memory_bytes"}
    yield Question(
        _estimate_request(request, rows.instead_of(workload), strategy), metrics=tuple(metrics)
    )


def is_as_planned(spec: TrainSpec | GenerateSpec) -> bool:
    """Return whether the job ran as planned, possibly with different row lengths.

    Prompts of real batches differ in length. For training, the planner does not model activations
    on disk, classification of whole samples, TRL's trainers, or several ranks per CPU host.
    """
    if isinstance(spec, TrainSpec):
        is_text = spec.objective == "next_token"
        is_alone = spec.parallel.processes_per_host == 1
        is_own = spec.engine == OWN_TRAINER
        return spec.activation_offload != "disk" and is_text and is_alone and is_own
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


def _estimate_request(
    request: PlanRequest, workload: Workload, strategy: Strategy
) -> EstimateRequest:
    fields: dict[str, Any] = {
        "model": request.model,
        "cluster": request.cluster,
        "workload": workload,
        "strategy": strategy,
        "engine": request.engine,
    }
    return EstimateRequest(**fields)


def _is_unmodelled(spec: TrainSpec | GenerateSpec) -> bool:
    """Return whether a training offloads optimizer states to disk or uses QAT."""
    if isinstance(spec, GenerateSpec):
        return False
    is_rounded = spec.quantized is not None and spec.quantized.method == "qat"
    return is_rounded or spec.optimizer_offload == "disk"
