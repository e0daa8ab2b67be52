"""Predictions that jobs carry: of evaluation, measurements, compressed models."""

import math
from collections.abc import Sequence
from typing import Any

from planner.catalog.models import find_model
from planner.cost.parameters import count_parameters
from planner.specs.estimate import Estimate, HostCalibration, PlannedStrategy, PlanRequest
from planner.specs.model import ModelSpec
from planner.specs.workload import GenerateWorkload, ServeWorkload, Strategy
from runners.jobspec import (
    BenchmarkSpec,
    CompressSpec,
    EvaluateSpec,
    GenerateSpec,
    ServeSpec,
    TrainSpec,
)
from runners.jobspec import (
    ModelSpec as JobModel,
)
from runners.jobspec.base import RandomModel
from runners.jobspec.compress import LIMIT_FIGURES, ClosedLoop, LoadOptions, window_of
from runners.jobspec.generate import PolicyOffload
from runners.plans.compression_spec import compress_spec
from runners.plans.generation_spec import SHARES
from runners.plans.load_levels import ARRIVAL_FIELDS
from runners.plans.refusals import DraftProblem
from runners.plans.workloads import CompressWork
from runners.shared.load_search import LevelSearch, excess_of
from webapp.core.problems import Problem
from webapp.hosts.machines import cluster_for_host
from webapp.hosts.models import Host
from webapp.modelhub.models import TeamModel
from webapp.plans.compression_gains import speed_words
from webapp.plans.models import Plan
from webapp.plans.places import Question
from webapp.plans.planning import estimate_as_planned, estimate_generation
from webapp.plans.verdict import figure_values

# ---------------------------------------------------------------------------
# Predict an evaluation's duration and memory from its passes over text windows.
# ---------------------------------------------------------------------------


Config = str | dict[str, Any]
Value = tuple[float, float, float]
ORIGINAL_DTYPE = "bf16"  # dtype in which a job loads the original
FP32_BYTES = 4
# Tensors of the size of the scored fp32 logits that exist at once while a window is scored:
# alone, the logits and their losses; with an original also its logits, both logarithms and
# their divergence. Counted in runners.jobs.evaluate.judge.
LOGITS_ALONE, LOGITS_BESIDE = 3, 7


def evaluation_prediction(
    spec: EvaluateSpec, model: TeamModel, began_with: Config
) -> dict[str, dict[str, Any]]:
    """Return duration and peak memory of an evaluation; empty if the planner has none.

    ``began_with`` is the original's shape. The duration covers held-out text only: the length of
    tasks is unknown until their files are read.
    """
    read = [(model.config, str(spec.weight_dtype))]
    if spec.original is not None:
        read.append((began_with, ORIGINAL_DTYPE))
    costs = [_pass_cost(config, dtype, model.host) for config, dtype in read]
    shape = find_model(model.config)
    if shape is None or None in costs:
        return {}
    _length, stride = window_of(shape.max_position_embeddings)
    passes = max(1, spec.evaluation_tokens // max(1, stride))
    seconds = _sum([_times(each[0], passes) for each in costs if each])
    logits = LOGITS_BESIDE if spec.original is not None else LOGITS_ALONE
    extra = logits * stride * shape.vocab_size * FP32_BYTES + sum(
        each[2] for each in costs[1:] if each
    )
    first = costs[0]
    peak = _sum([first[1], (extra, extra, extra)]) if first else (0.0, 0.0, 0.0)
    return {
        "duration_seconds": _figure(seconds, "seconds"),
        "peak_memory_bytes": _figure(peak, "bytes"),
    }


def _pass_cost(config: Config, dtype: str, host: Host | None) -> tuple[Value, Value, float] | None:
    """Return the seconds of one window, the peak of one model, and its weights in bytes."""
    shape = find_model(config)
    estimate = _estimate(config, dtype, host, shape) if host and shape else None
    if estimate is None or shape is None:
        return None
    seconds, peak = (_value(estimate, name) for name in ("prefill_seconds", "peak_memory_bytes"))
    if seconds is None or peak is None:
        return None
    weights = estimate.memory.breakdown_bytes.get("weights", 0)
    return _times(seconds, _more_head(shape)), peak, float(weights)


def _estimate(config: Config, dtype: str, host: Host, shape: ModelSpec) -> Estimate | None:
    length, _stride = window_of(shape.max_position_embeddings)
    try:
        cluster = cluster_for_host(host)
    except Problem:
        return None
    workload = GenerateWorkload(batch_size=1, input_tokens=max(1, length - 1), output_tokens=1)
    calibration = HostCalibration.model_validate(host.calibration) if host.calibration else None
    request = PlanRequest(
        model=config, cluster=cluster, workload=workload, host_calibration=calibration
    )
    return estimate_generation(request, dtype, max(1, length - 1), 1)


def _more_head(shape: ModelSpec) -> float:
    """Return the work of a window relative to a prefill, which scores only the last token."""
    counts = count_parameters(shape)
    layers = (
        counts.query_output
        + counts.key_value
        + counts.replicated
        + counts.feed_forward
        + counts.experts_active
    )
    length, stride = window_of(shape.max_position_embeddings)
    head = shape.vocab_size * shape.hidden_size
    return (layers * length + head * (stride + 1)) / (layers * length + head)


def _value(estimate: Estimate, name: str) -> Value | None:
    figure = figure_values(estimate, name)
    if figure is None:
        return None
    value, low, high = figure
    return value, value if low is None else low, value if high is None else high


def _times(value: Value, factor: float) -> Value:
    return value[0] * factor, value[1] * factor, value[2] * factor


def _sum(values: list[Value]) -> Value:
    first, second, third = (sum(each) for each in zip(*values, strict=True))
    return first, second, third


def _figure(value: Value, unit: str) -> dict[str, Any]:
    return {"value": value[0], "low": value[1], "high": value[2], "unit": unit}


# ---------------------------------------------------------------------------
# Load tests of serving plans: options of the form, and the plan's predictions.
# ---------------------------------------------------------------------------


CURVE = "under_load"  # key of the load curve in a job's prediction
CURVE_FIGURES = ("tokens_per_second", "ttft_seconds", "tpot_seconds")
BETWEEN = 16  # points of the curve between the measured ones
BESIDE = 2.0  # the curve of a search reaches this factor beyond its first level and the limit
LIMIT_UNITS = {"closed": "clients", "open": "requests/s"}
MOST_ESTIMATES, LIMIT_RESOLUTION = 24, 1.02  # of the search for the predicted limit


def usual_points(concurrency: int) -> str:
    """Return the default sweep up to a plan's concurrency, doubling from 1."""
    doubled = [2**power for power in range(concurrency.bit_length()) if 2**power < concurrency]
    return ", ".join(map(str, [*doubled[-11:], concurrency]))


# Predictions


def estimate_at(
    question: Question, strategy: Strategy, options: LoadOptions, point: float
) -> Estimate | None:
    """Return the estimate of the plan's strategy at a load point, if the planner has one."""
    planned = question.request.workload
    if not isinstance(planned, ServeWorkload):
        return None
    # A load test sends requests of one length.
    others = dict.fromkeys((*ARRIVAL_FIELDS.values(), "length_variation"))
    value = point if options.arrivals.kind == "open" else round(point)
    workload = planned.model_copy(update={**others, ARRIVAL_FIELDS[options.arrivals.kind]: value})
    return estimate_as_planned(question.request, workload, strategy)


def predicted_limit(question: Question, strategy: Strategy, options: LoadOptions) -> float | None:
    """Return the highest load that meets a search's targets by the plan; None if none does.

    It is searched for as the job does, among the plan's figures at the same percentile.
    """
    if options.search is None:
        return None
    targets = options.search.targets
    levels = LevelSearch(
        options.arrivals.points[0],
        highest=options.highest,
        is_whole=isinstance(options.arrivals, ClosedLoop),
        max_points=MOST_ESTIMATES,
        resolution=LIMIT_RESOLUTION,
    )
    while (level := levels.next_level()) is not None:
        estimate = estimate_at(question, strategy, options, level)
        said = {name: figure_values(estimate, name) for name in targets if estimate}
        figures = {name: figure[0] for name, figure in said.items() if figure}
        levels.record(level, [excess_of(targets, figures, failed=0)])
    return levels.met


def search_span(options: LoadOptions, limit: float | None) -> tuple[float, ...]:
    """Return the points between which a search's curve is drawn, its first level among them."""
    first = options.arrivals.points[0]
    ends = (first, limit or first)
    is_whole = isinstance(options.arrivals, ClosedLoop)
    top = min(options.highest, BESIDE * max(ends))
    return tuple(sorted({1.0 if is_whole else min(ends) / BESIDE, first, float(math.ceil(top))}))


def curve_of(
    question: Question,
    strategy: Strategy,
    options: LoadOptions,
    points: Sequence[float] = (),
) -> dict[str, Any]:
    """Return the plan's figures at the measured points, or at others, and between them."""
    rows = []
    points = points or options.arrivals.points
    for point in curve_points(points, whole=options.arrivals.kind != "open"):
        estimate = estimate_at(question, strategy, options, point)
        figures = {name: figure_values(estimate, name) for name in CURVE_FIGURES if estimate}
        if available := {name: figure for name, figure in figures.items() if figure}:
            rows.append({"point": point, **available})
    return {"rows": rows}


def curve_points(points: Sequence[float], *, whole: bool) -> list[float]:
    """Return the points, with evenly spaced ones added between the first and the last."""
    first, last = points[0], points[-1]
    steps = [first + (last - first) * index / (BETWEEN + 1) for index in range(1, BETWEEN + 1)]
    between = [float(round(each)) for each in steps] if whole else steps
    return sorted({*points, *between})


# ---------------------------------------------------------------------------
# Predictions of a job's measurements: the planner's figures by the job's metric names.
# ---------------------------------------------------------------------------


BENCHMARK_METRICS = {  # measured metric -> planner's name
    "ttft_seconds": "prefill_seconds",
    "prefill_tokens_per_second": "prefill_tokens_per_second",
    "tpot_seconds": "tpot_seconds",
    "decode_tokens_per_second": "decode_tokens_per_second",
    "peak_memory_bytes": "peak_memory_bytes",
}
ENERGY_METRICS = {  # per token; not for endpoints, where they depend on the clients
    name: name
    for name in (
        "energy_joules_per_token",
        "electricity_usd_per_million_tokens",
        "cost_usd_per_million_tokens",
    )
}
GENERATE_METRICS = {
    **BENCHMARK_METRICS,
    "tokens_per_second": "tokens_per_second",
    **ENERGY_METRICS,
}
SERVE_METRICS = {  # without tokens per second, which depends on the clients
    "ttft_seconds": "ttft_seconds",
    "tpot_seconds": "tpot_seconds",
    "peak_memory_bytes": "peak_memory_bytes",
}
PEAK_METRICS = {"peak_memory_bytes": "peak_memory_bytes"}
LOAD_METRICS = {  # at the main point of a sweep
    "tokens_per_second": "tokens_per_second",
    "ttft_seconds": "ttft_seconds",
    "tpot_seconds": "tpot_seconds",
}
TRAIN_METRICS = {
    "tokens_per_second": "tokens_per_second",
    "step_seconds": "step_seconds",
    "peak_memory_bytes": "peak_memory_bytes",
    "mfu": "mfu",
    **ENERGY_METRICS,
}
UNITS = {"_bytes": "bytes", "_per_second": "tokens_per_second", "_seconds": "seconds"}
UNITS |= {"mfu": "share"}
UNITS |= {"_joules_per_token": "joules_per_token", "_usd_per_million_tokens": "usd"}


def prediction_of(
    spec: JobModel, best: PlannedStrategy, question: Question
) -> dict[str, dict[str, Any]]:
    """Return the planner's predictions of the figures that the job will measure."""
    if isinstance(spec, TrainSpec):
        figures = _figures(best, TRAIN_METRICS, 1)
        if ratio := best.performance.communication_ratio:  # a plan predicts the exposed part only
            figures["exposed_communication_ratio"] = _exactly(ratio, "share")
        return figures
    if isinstance(spec, GenerateSpec):
        placed = (
            _offload_predictions(spec.offload, best)
            if isinstance(spec.offload, PolicyOffload)
            else {}
        )
        return _figures(best, GENERATE_METRICS, spec.batch_size) | placed
    if isinstance(spec, ServeSpec):
        return _figures(best, SERVE_METRICS, spec.max_concurrency)
    if isinstance(spec, BenchmarkSpec):
        return _predict_benchmark(spec, best, question)
    if isinstance(spec, EvaluateSpec):
        return _predict_evaluation(spec, question)
    predictions: dict[str, dict[str, Any]] = {}
    for prefix, dtype in spec.predictable_phases:
        tokens = (spec.prompt_tokens, spec.output_tokens)
        estimate = estimate_generation(question.request, dtype, *tokens)
        if estimate is not None:
            figures = _figures(estimate, BENCHMARK_METRICS, 1)
            predictions |= {f"{prefix}{name}": figure for name, figure in figures.items()}
    return predictions


def _predict_evaluation(spec: EvaluateSpec, question: Question) -> dict[str, dict[str, Any]]:
    """Return the prediction of a model evaluated alone; an original's shape is not known here."""
    if spec.original is not None or question.host is None:
        return {}
    shape = question.request.model
    config = shape.model_dump(mode="json") if isinstance(shape, ModelSpec) else shape
    return evaluation_prediction(spec, TeamModel(config=config, host=question.host), config)


def _offload_predictions(
    policy: PolicyOffload, best: PlannedStrategy
) -> dict[str, dict[str, Any]]:
    """Return the planned offload fractions and the resulting bytes."""
    shares = {name: _exactly(getattr(policy, name), "share") for name in SHARES}
    memory = best.memory
    sizes = {"host_bytes": memory.host_bytes, "offloaded_disk_bytes": memory.disk_bytes}
    return shares | {name: _exactly(value or 0, "bytes") for name, value in sizes.items()}


def _exactly(value: float, unit: str) -> dict[str, Any]:
    return {"value": value, "low": None, "high": None, "unit": unit}


def _predict_benchmark(
    spec: BenchmarkSpec, best: PlannedStrategy, question: Question
) -> dict[str, dict[str, Any]]:
    """Return a batch's predictions; of a load test, the main point, largest peak and curve.

    Of a search it also has the limit.
    """
    options = spec.load
    if options is None:
        return _figures(best, BENCHMARK_METRICS, spec.batch_size)
    main, last = options.main_point(spec.batch_size), options.arrivals.points[-1]
    points: tuple[float, ...] = ()
    predictions: dict[str, dict[str, Any]] = {}
    if options.search:
        kind, limit = options.arrivals.kind, predicted_limit(question, best.strategy, options)
        last, points = (last if kind == "open" else options.highest), search_span(options, limit)
        if limit is not None:
            predictions[LIMIT_FIGURES[kind]] = _exactly(limit, LIMIT_UNITS[kind])
    predictions[CURVE] = curve_of(question, best.strategy, options, points)
    for point, metrics in ((main, LOAD_METRICS), (last, PEAK_METRICS)):
        if estimate := estimate_at(question, best.strategy, options, point):
            predictions |= _figures(estimate, metrics, spec.batch_size)
    return predictions


def _figures(estimate: Estimate, metrics: dict[str, str], batch: int) -> dict[str, dict[str, Any]]:
    """Return value, low, high and unit of each metric in the estimate."""
    figures = {}
    for metric, name in metrics.items():
        figure = _decode_rate(estimate, batch) if name.startswith("decode_") else None
        figure = figure or figure_values(estimate, name)
        if figure is not None:
            value, low, high = figure
            figures[metric] = {"value": value, "low": low, "high": high, "unit": _unit(metric)}
    return figures


def _decode_rate(
    estimate: Estimate, batch: int
) -> tuple[float, float | None, float | None] | None:
    """Return the tokens per second of a decoding batch."""
    each = estimate.performance.tpot_seconds
    if not each:
        return None
    low, high = estimate.interval.get("tpot_seconds", (None, None))
    return batch / each, batch / high if high else None, batch / low if low else None


def _unit(metric: str) -> str:
    return next((unit for ending, unit in UNITS.items() if metric.endswith(ending)), "")


# ---------------------------------------------------------------------------
# Predicted speed of a compressed model relative to its original.
# ---------------------------------------------------------------------------


# Speed on catalog hardware is predicted for the engine commonly used there.
CATALOG_ENGINE, CATALOG_NAME = "vllm", "vLLM"
NOT_SERVED = ("gguf", "qmoe")  # vLLM has no kernels for these


def planned_speed(plan: Plan) -> str:
    """Return the single-user speed of a plan's compressed model relative to the original.

    On a host it is what the job will measure; on catalog hardware it is vLLM's speed with the
    format. Empty if the planner cannot predict it, and for other goals.
    """
    values = plan.document.workload
    if not isinstance(values, CompressWork) or not plan.request:
        return ""
    request = PlanRequest.model_validate(plan.request)
    try:
        spec = compress_spec(values, RandomModel(config={}))
    except DraftProblem:
        return ""
    if isinstance(request.cluster.device, str):
        return _in_engine(request, spec)
    formats = dict(spec.predictable_phases)
    ratio = _ratio(request, spec, *(formats.get(each) for each in ("original_", "")))
    return f"{speed_words(ratio)} here" if ratio else ""


def _in_engine(request: PlanRequest, spec: CompressSpec) -> str:
    if spec.is_structural or spec.rounds_inputs or spec.method in NOT_SERVED:
        return ""
    engine_request = request.model_copy(update={"engine": CATALOG_ENGINE})
    ratio = _ratio(engine_request, spec, "bf16", spec.weight_dtype)
    return f"{speed_words(ratio)} in {CATALOG_NAME}" if ratio else ""


def _ratio(
    request: PlanRequest, spec: CompressSpec, before: str | None, after: str | None
) -> float | None:
    """Return the single-user decode speed with ``after`` weights over that with ``before``."""
    times = [_seconds_per_token(request, spec, dtype) for dtype in (before, after)]
    return times[0] / times[1] if times[0] and times[1] else None


def _seconds_per_token(
    request: PlanRequest, spec: CompressSpec, dtype: str | None
) -> float | None:
    if dtype is None:
        return None
    workload = GenerateWorkload(
        batch_size=1, input_tokens=spec.prompt_tokens, output_tokens=spec.output_tokens
    )
    strategy = Strategy.model_validate({"weight_dtype": dtype})
    estimate = estimate_as_planned(request, workload, strategy)
    return estimate.performance.tpot_seconds if estimate else None
