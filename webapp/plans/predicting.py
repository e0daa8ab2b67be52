"""Predictions of a job's measurements: the planner's figures by the job's metric names."""

from typing import Any

from planner.specs.estimate import Estimate, PlannedStrategy
from runners.jobspec import (
    BenchmarkSpec,
    EvaluateSpec,
    GenerateSpec,
    ModelSpec,
    ServeSpec,
    TrainSpec,
)
from runners.jobspec.generate import PolicyOffload
from webapp.plans.generating import SHARES
from webapp.plans.measuring import CURVE, curve_of, estimate_at
from webapp.plans.planning import estimate_generation
from webapp.plans.questions import Question
from webapp.plans.verdict import figure_values

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
    spec: ModelSpec, best: PlannedStrategy, question: Question
) -> dict[str, dict[str, Any]]:
    """Return the planner's predictions of the figures that the job will measure."""
    if isinstance(spec, TrainSpec):
        return _figures(best, TRAIN_METRICS, 1) | _communication(best)
    if isinstance(spec, GenerateSpec):
        placed = _placed(spec.offload, best) if isinstance(spec.offload, PolicyOffload) else {}
        return _figures(best, GENERATE_METRICS, spec.batch_size) | placed
    if isinstance(spec, ServeSpec):
        return _figures(best, SERVE_METRICS, spec.max_concurrency)
    if isinstance(spec, BenchmarkSpec):
        return _measurement(spec, best, question)
    if isinstance(spec, EvaluateSpec):
        return {}
    predictions: dict[str, dict[str, Any]] = {}
    for prefix, dtype in spec.predictable_phases:
        tokens = (spec.prompt_tokens, spec.output_tokens)
        estimate = estimate_generation(question.request, dtype, *tokens)
        if estimate is not None:
            figures = _figures(estimate, BENCHMARK_METRICS, 1)
            predictions |= {f"{prefix}{name}": figure for name, figure in figures.items()}
    return predictions


def _communication(best: PlannedStrategy) -> dict[str, dict[str, Any]]:
    """Return the predicted share of communication in a step; empty without any.

    A plan predicts only the exposed part.
    """
    ratio = best.performance.communication_ratio
    return {"exposed_communication_ratio": _exactly(ratio, "share")} if ratio else {}


def _placed(policy: PolicyOffload, best: PlannedStrategy) -> dict[str, dict[str, Any]]:
    """Return the planned offload shares and the resulting bytes."""
    shares = {name: _exactly(getattr(policy, name), "share") for name in SHARES}
    memory = best.memory
    sizes = {"host_bytes": memory.host_bytes, "offloaded_disk_bytes": memory.disk_bytes}
    return shares | {name: _exactly(value or 0, "bytes") for name, value in sizes.items()}


def _exactly(value: float, unit: str) -> dict[str, Any]:
    return {"value": value, "low": None, "high": None, "unit": unit}


def _measurement(
    spec: BenchmarkSpec, best: PlannedStrategy, question: Question
) -> dict[str, dict[str, Any]]:
    """Return a batch's figures; under load, the main point's, the largest peak and the curve."""
    options = spec.load
    if options is None:
        return _figures(best, BENCHMARK_METRICS, spec.batch_size)
    main, last = options.main_point(spec.batch_size), options.arrivals.points[-1]
    predictions: dict[str, dict[str, Any]] = {CURVE: curve_of(question, best.strategy, options)}
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
