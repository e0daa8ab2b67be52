"""Predict an evaluation's duration and memory from its passes over text windows."""

from typing import Any

from planner.cost.parameters import count_parameters
from planner.specs.estimate import Estimate, HostCalibration, PlanRequest
from planner.specs.model import ModelSpec
from planner.specs.workload import GenerateWorkload
from runners.jobspec import EvaluateSpec
from runners.jobspec.benchmark import window_of
from webapp.core.problems import Problem
from webapp.hosts.device import cluster_for_host
from webapp.hosts.models import Host
from webapp.modelhub.models import TeamModel
from webapp.modelhub.shapes import catalog_shape, shape_of
from webapp.plans.planning import estimate_generation
from webapp.plans.verdict import figure_values

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
    shape = _shape(model.config)
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
    shape = _shape(config)
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


def _shape(config: Config) -> ModelSpec | None:
    return catalog_shape(config) if isinstance(config, str) else shape_of(config)


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
