"""Measure a model as planned: ``python -m runners.jobs.load.benchmark ATTEMPT_DIR``."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, PreTrainedModel

from runners.jobs.evaluation import (
    Assessment,
    Perplexity,
    Sampling,
    Workload,
    assess,
    evaluate,
    held_out_ids,
    next_token,
    perplexity_ratio,
    random_prompt,
    synchronise_device,
)
from runners.jobs.events import Stages
from runners.jobs.load.job import measure_under_load
from runners.jobs.loading import (
    HOW_QUANTISED,
    load_model,
    note_weights,
    pick_device,
    preload_library,
    require_tokenizer,
    stored_quantisation,
)
from runners.jobs.memory import PeakMeter
from runners.jobs.model_files import opened_model
from runners.jobs.ratios import run_isolated
from runners.jobs.runtime import (
    BadInputError,
    Job,
    job_telemetry,
    num_threads,
    publish_report,
    run_job,
)
from runners.jobspec import ArtefactModel, BenchmarkSpec, FolderModel
from runners.jobspec.compress import (
    MAX_ROWS,
    MEASURING,
    OPERATORS_ARTEFACT,
    PHASES,
    QUANTISED_DTYPES,
    Bound,
    OperatorRow,
    Phase,
    ProfileReport,
)

# Profiles the operators of a prefill and a decode step with torch's profiler.
#
# An operator is classified by the FLOPs and bytes of its shapes, at the rates of a large product
# and a large copy measured in the same process: bound by compute, by memory bandwidth, or, if far
# from both, by call overhead.


# mypy: disable-error-code="no-untyped-call"
# torch ships types, but leaves some of its profiler's functions without.


DECODE_STEPS = 8
PRODUCT_SIZE = 768
COPY_BYTES = 64 * 1024**2
PROBES = 5
ATTENTION_DIMENSIONS = ("batch", "heads", "length", "size")
OVERHEAD_SHARE = 0.1  # of its time: an operator with less useful work is overhead-bound
SHAPES_LENGTH = 240
# Operators that only create views of memory, or allocate it.
BOOKKEEPING = (
    "view", "reshape", "transpose", "permute", "expand", "slice", "select", "as_strided",
    "aten::t",
    "squeeze", "unsqueeze", "detach", "split", "chunk", "narrow", "alias", "empty", "resize_",
    "lift_fresh", "result_type", "resolve", "is_nonzero", "item", "_local_scalar",
)  # fmt: skip


class Rates(NamedTuple):
    """The device's best measured rates in the model's dtype."""

    flops_per_second: float
    bytes_per_second: float


@torch.inference_mode()
def profile_model(model: PreTrainedModel, workload: Workload) -> ProfileReport:
    """Return the operators of one prefill and some decode steps, after a warm-up pass."""
    steps = max(1, min(DECODE_STEPS, workload.output_tokens - 1))
    prompt = random_prompt(model, workload)
    plain = _seconds(prompt.device, lambda: _passes(model, prompt, steps, _nothing))
    plain = min(plain, _seconds(prompt.device, lambda: _passes(model, prompt, steps, _nothing)))
    weights = next(each for each in model.parameters() if each.is_floating_point())
    rates = measured_rates(weights)
    events: dict[Phase, Any] = {}

    cuda = [ProfilerActivity.CUDA] if prompt.device.type == "cuda" else []

    def watched(phase: Phase, run: Callable[[], None]) -> None:
        with profile(
            activities=[ProfilerActivity.CPU, *cuda],
            record_shapes=True,
            with_flops=True,
            acc_events=True,
        ) as watch:
            run()
            synchronise_device(prompt.device)
        events[phase] = watch.key_averages(group_by_input_shape=True)

    took = _seconds(prompt.device, lambda: _passes(model, prompt, steps, watched))
    size = weights.element_size()
    rows = [row for phase in PHASES for row in rows_of(phase, events[phase], rates, size)]
    return ProfileReport(
        batch_size=workload.batch_size,
        prompt_tokens=workload.prompt_tokens,
        decode_steps=steps,
        slowdown_ratio=took / plain,
        flops_per_second=rates.flops_per_second,
        bytes_per_second=rates.bytes_per_second,
        rows=tuple(rows),
    )


Watch = Callable[[Phase, Callable[[], None]], None]


def _nothing(_phase: Phase, run: Callable[[], None]) -> None:
    run()


def _passes(model: PreTrainedModel, prompt: torch.Tensor, steps: int, watch: Watch) -> None:
    """Run the prefill and decode ``steps`` tokens, each phase through ``watch``."""
    cache, token = DynamicCache(config=model.config), prompt

    def step() -> None:
        nonlocal token
        token = next_token(model, token, cache)

    def decode() -> None:
        for _ in range(steps):
            step()

    watch("prefill", step)
    watch("decode", decode)


def _seconds(device: torch.device, work: Callable[[], None]) -> float:
    synchronise_device(device)
    began = time.perf_counter()
    work()
    synchronise_device(device)
    return time.perf_counter() - began


# Device rates


def measured_rates(like: torch.Tensor) -> Rates:
    """Return the best rates of a few large products and copies, in the dtype of ``like``."""
    left = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, dtype=like.dtype, device=like.device)
    source = torch.ones(COPY_BYTES // like.element_size(), dtype=like.dtype, device=like.device)
    target = torch.empty_like(source)
    product = min(_seconds(like.device, lambda: _multiply(left)) for _ in range(PROBES))
    copied = min(_seconds(like.device, lambda: _copy(source, target)) for _ in range(PROBES))
    return Rates(2 * PRODUCT_SIZE**3 / product, 2 * COPY_BYTES / copied)


def _multiply(left: torch.Tensor) -> None:
    torch.mm(left, left)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


# Profiler results


def rows_of(
    phase: Phase, events: Sequence[Any], rates: Rates, element_bytes: int
) -> list[OperatorRow]:
    """Return a phase's operators, longest first; the short ones are summed in one row."""
    rows = [
        _row(phase, each, rates, element_bytes)
        for each in events
        if each.device_type.name == "CPU" and _own_seconds(each) > 0
    ]
    rows.sort(key=lambda row: -row.seconds)
    shown, rest = rows[:MAX_ROWS], rows[MAX_ROWS:]
    return [*shown, *([_rest(phase, rest)] if rest else [])]


def _rest(phase: Phase, rows: Sequence[OperatorRow]) -> OperatorRow:
    return OperatorRow(
        phase=phase,
        name=f"{len(rows)} others",
        shapes="",
        calls=sum(row.calls for row in rows),
        seconds=sum(row.seconds for row in rows),
        bound="overhead",
    )


def _own_seconds(event: Any) -> float:  # noqa: ANN401 - torch gives its events no type
    """Return an operator's self time, on its device if it has device time."""
    own = event.self_device_time_total or event.self_cpu_time_total
    return float(own) / 1e6


def _row(phase: Phase, event: Any, rates: Rates, element_bytes: int) -> OperatorRow:  # noqa: ANN401 - as above
    shapes = [each for each in event.input_shapes if each]
    seconds, calls = _own_seconds(event), int(event.count)
    flops = flops_of(event.key, shapes, float(event.flops or 0), calls)
    moved = calls * element_bytes * sum(math.prod(each) for each in shapes)
    return OperatorRow(
        phase=phase,
        name=event.key[:120],
        shapes=" ".join("x".join(map(str, each)) for each in shapes)[:SHAPES_LENGTH],
        calls=calls,
        seconds=seconds,
        flops=flops,
        bound=bound_of(event.key, seconds, flops or 0.0, moved, rates),
    )


def flops_of(
    name: str, shapes: Sequence[Sequence[int]], counted: float, calls: int
) -> float | None:
    """Return all calls' FLOPs: torch's count, ours for fused attention, else None."""
    is_attention = "scaled_dot_product" in name and len(shapes) > 1
    if is_attention and len(shapes[0]) == len(shapes[1]) == len(ATTENTION_DIMENSIONS):
        batch, heads, queries, size = shapes[0]
        return 4.0 * calls * batch * heads * queries * shapes[1][2] * size
    return counted or None


def bound_of(name: str, seconds: float, flops: float, moved: float, rates: Rates) -> Bound:
    """Return the planner's operator class of an operator."""
    if any(each in name for each in BOOKKEEPING):
        return "overhead"
    computing, moving = flops / rates.flops_per_second, moved / rates.bytes_per_second
    if max(computing, moving) < OVERHEAD_SHARE * seconds:
        return "overhead"
    return "compute" if computing > moving else "memory_bandwidth"


LOADING = "Loading the model"
PROFILING = "Profiling the operators"
ORIGINAL = "Evaluating the original"


def work(job: Job) -> None:
    """Run one benchmark attempt."""
    spec = job.spec_of(BenchmarkSpec)
    if spec.load is not None:
        measure_under_load(job, spec, spec.load)
        return
    preload_library(spec.weight_dtype)
    with job_telemetry(job):
        stages = Stages(job.emitter, _stage_shares(job, spec))
        note_weights(job, spec.model)
        assessment, profiled = run_isolated(job, partial(_assess, spec, stages))
        measured = assessment.result_metrics()
        notes = {**assessment.notes(), **_context(spec)}
        if assessment.perplexity and _has_original(job, spec):
            original = run_isolated(job, partial(_original_perplexity, spec, stages))
            ratio, low, high = perplexity_ratio(assessment.perplexity, original)
            measured |= original.result_metrics("original_")
            measured |= {
                "perplexity_ratio": ratio,
                "perplexity_ratio_low": low,
                "perplexity_ratio_high": high,
            }
            notes["perplexity_ratio"] = f"{spec.weight_dtype} / bf16, same windows pair by pair"
    if profiled is not None:
        publish_report(job, OPERATORS_ARTEFACT, profiled.model_dump(mode="json"))
    job.emitter.result(measured, notes)


def _stage_shares(job: Job, spec: BenchmarkSpec) -> dict[str, float]:
    profiling = {PROFILING: 1.0} if spec.profile else {}
    original = {ORIGINAL: 2.0} if _has_original(job, spec) else {}
    return {LOADING: 2.0, MEASURING: 5.0, **profiling, **original}


def _assess(
    spec: BenchmarkSpec, stages: Stages, job: Job
) -> tuple[Assessment, ProfileReport | None]:
    stages = stages.via(job.emitter)
    stages.begin(LOADING)
    meter = PeakMeter(pick_device())
    loaded = load_model(job, spec.model, spec.weight_dtype)
    if isinstance(spec.model, FolderModel | ArtefactModel):
        require_tokenizer(loaded, "perplexity")
    workload = Workload(spec.batch_size, spec.prompt_tokens, spec.output_tokens, spec.seed)
    stages.begin(MEASURING)
    sampling = Sampling(workload, spec.repetitions, spec.evaluation_tokens)
    assessment = assess(job, loaded, sampling, meter, stages)
    if not spec.profile:
        return assessment, None
    stages.begin(PROFILING)  # last: a profiled pass is slow and uses additional memory
    return assessment, profile_model(loaded.model, workload)


def _has_original(job: Job, spec: BenchmarkSpec) -> bool:
    """Return whether this run quantises a folder of plain weights."""
    if spec.weight_dtype not in QUANTISED_DTYPES or not isinstance(
        spec.model, FolderModel | ArtefactModel
    ):
        return False
    return stored_quantisation(opened_model(spec.model, job.host_dir)) is None


def _original_perplexity(spec: BenchmarkSpec, stages: Stages, job: Job) -> Perplexity:
    stages = stages.via(job.emitter)
    stages.begin(ORIGINAL)
    loaded = load_model(job, spec.model, "bf16")
    ids = held_out_ids(job, loaded)
    if ids is None:
        msg = "the model lost its tokenizer while the job ran; put tokenizer.json back"
        raise BadInputError(msg)
    return evaluate(loaded.model, ids, spec.evaluation_tokens, stages.advance)


def _context(spec: BenchmarkSpec) -> dict[str, str]:
    context = {"device": str(pick_device()), "threads": str(num_threads())}
    if spec.weight_dtype in QUANTISED_DTYPES:
        context["weight_dtype"] = HOW_QUANTISED[spec.weight_dtype]
    return context


if __name__ == "__main__":
    run_job("benchmark", work)
