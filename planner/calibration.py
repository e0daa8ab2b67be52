"""Closes the loop: what a host measured, beside what was predicted, becomes its factors.

A job measures whole phases (a prefill, a decode step, a training step, a peak). The error is put
down to the operator class that dominates the phase: what the other classes are predicted to take
is subtracted first. Factors are means of log ratios, shrunk towards 1 while they are few.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import cast

from planner.api import estimate
from planner.specs.base import OperatorClass
from planner.specs.calibration import CalibrationFactor, HostCalibration, Measurement
from planner.specs.estimate import Estimate, EstimateRequest

# As many measurements as this weigh as much as the belief that the prior is right.
PRIOR_STRENGTH = 0.5
# A single wrong measurement must not turn the planner upside down.
MAX_RATIO = 20.0
# What is left for the dominating class is at least this share of what was measured.
MIN_ATTRIBUTED = 0.1
PHASE_BY_METRIC = {
    "ttft_seconds": "prefill",
    "prefill_seconds": "prefill",
    "tpot_seconds": "decode",
    "step_seconds": "train_step",
    "duration_seconds": "compress",
}
PEAK = "per_device_peak_bytes"
MODELLED_MEMORY = ("activations", "runtime_overhead")


def calibrate_host(measurements: Iterable[Measurement]) -> HostCalibration:
    """Return a host's factors from its measurements, with count and residual spread per class.

    Assumes that all measurements are of one host and were predicted without its calibration; an
    empty set gives a calibration without factors.
    """
    by_class: dict[OperatorClass, list[float]] = defaultdict(list)
    kept = tuple(measurements)
    for one in kept:
        ratio = min(max(one.measured / one.predicted, 1 / MAX_RATIO), MAX_RATIO)
        by_class[one.operator_class].append(math.log(ratio))
    return HostCalibration(
        host=kept[0].host if kept else "unknown",
        factors={name: _factor(logs) for name, logs in sorted(by_class.items())},
        digest=_digest(kept),
    )


def _factor(logs: list[float]) -> CalibrationFactor:
    count = len(logs)
    shrunk = sum(logs) / (count + PRIOR_STRENGTH)
    spread = math.sqrt(sum((value - shrunk) ** 2 for value in logs) / count)
    return CalibrationFactor(factor=math.exp(shrunk), n=count, spread=spread)


def _digest(measurements: tuple[Measurement, ...]) -> str:
    lines = sorted(one.model_dump_json() for one in measurements)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def measurements_of(
    request: EstimateRequest,
    measured: Mapping[str, float],
    *,
    host: str,
    measured_at: str | None = None,
    job: str | None = None,
) -> tuple[Measurement, ...]:
    """Return what a finished job says about its host, each figure put down to one class.

    ``measured`` has figures by the planner's names: ``ttft_seconds``, ``tpot_seconds``,
    ``step_seconds``, ``duration_seconds``, ``per_device_peak_bytes``; others are ignored. The
    prediction is made anew without the host's calibration, so that factors never compound.
    """
    prior = estimate(request.model_copy(update={"host_calibration": None}))
    found = []
    for metric, value in measured.items():
        attributed = _attributed(prior, metric, value)
        if attributed is None:
            continue
        operator_class, predicted, actual = attributed
        found.append(
            Measurement(
                metric=metric,
                predicted=predicted,
                measured=actual,
                operator_class=operator_class,
                host=host,
                measured_at=measured_at,
                job=job,
            )
        )
    return tuple(found)


def _attributed(
    prior: Estimate, metric: str, value: float
) -> tuple[OperatorClass, float, float] | None:
    """Return the dominating class of a figure, its predicted and its measured part."""
    if value <= 0:
        return None
    if metric == PEAK:
        classes = prior.memory.breakdown_bytes
        modelled = float(sum(classes.get(name, 0) for name in MODELLED_MEMORY))
        exact = prior.memory.per_device_peak_bytes - modelled
        return ("memory", modelled, max(value - exact, MIN_ATTRIBUTED * modelled))
    phase = prior.time_breakdown_seconds.get(PHASE_BY_METRIC.get(metric, ""))
    if not phase:
        return None
    name, own = max(phase.items(), key=lambda item: item[1])
    others = sum(phase.values()) - own
    return cast("OperatorClass", name), own, max(value - others, MIN_ATTRIBUTED * value)
