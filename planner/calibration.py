"""Compute a host's calibration factors from measured and predicted figures.

A job measures whole phases (a prefill, a decode step, a training step, a peak). The error is
attributed to the operator class that dominates the phase, after the predicted times of the other
classes are subtracted.

A factor is the posterior mean of a normal hierarchy of log ratios: runs scatter about their host's
factor, and hosts' factors about 1. One run counts once per operator class, however many figures it
has. Unreliable runs are held back with a reason: an extreme run that no other run confirms, and a
run that contradicts the others. The result does not depend on the order of the measurements, to
the last bit.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple, cast

from planner.api import estimate
from planner.specs.base import OperatorClass
from planner.specs.estimate import (
    CalibrationFactor,
    Estimate,
    EstimateRequest,
    HostCalibration,
    Measurement,
)
from planner.workload.outcome import TIME_SPREAD

# Log spread of hosts' factors about 1, also used for the scatter of a host's runs until the host
# has repeated a run.
PRIOR_SPREAD = TIME_SPREAD["same family"]
# Weight of the prior on run scatter, in residuals.
PRIOR_RESIDUALS = 2
# Huber (1964): residuals beyond this many spreads are clipped to it.
CLIP_SPREADS = 2.0
# A run further from its prediction than this may be faulty; another run within AGREES confirms it.
UNCONFIRMED = math.log(4.0)
AGREES = math.log(2.0)
# A run is an outlier among at least OUTLIER_RUNS runs beyond this log ratio and this many
# deviations.
OUTLIER_RUNS = 3
OUTLIER_LEAST = math.log(3.0)
OUTLIER_DEVIATIONS = 4.0
MAD_TO_SPREAD = 1.4826  # of a normal distribution: 1 / its 75 % quantile
# Limit on one measurement's ratio.
MAX_RATIO = 20.0
# Minimum share of the measured value attributed to the dominating class.
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


class CheckedMeasurement(NamedTuple):
    """A measurement with the reason for holding it back, "" if it counts."""

    measurement: Measurement
    held_back: str = ""


class _Run(NamedTuple):
    """The median log ratio of one run for one operator class."""

    log_ratio: float
    measurements: tuple[Measurement, ...]


def calibrate_host(measurements: Iterable[Measurement]) -> HostCalibration:
    """Return a host's factors, each with the number of its runs and their residual spread.

    Assumes that all measurements are of one host and were predicted without its calibration.
    Without usable measurements the calibration has no factors.
    """
    checked = check_measurements(measurements)
    counted = tuple(each.measurement for each in checked if not each.held_back)
    return HostCalibration(
        host=checked[0].measurement.host if checked else "unknown",
        factors={
            name: _factor([run.log_ratio for run in runs])
            for name, runs in sorted(_runs_by_class(counted).items())
        },
        digest=_digest(counted),
    )


def check_measurements(measurements: Iterable[Measurement]) -> tuple[CheckedMeasurement, ...]:
    """Return every measurement with its hold-back reason, in the given order.

    Assumes that all are of one host. A measurement without a job is its own run.
    """
    given = tuple(measurements)
    reasons = {
        id(measurement): why
        for runs in _runs_by_class(given).values()
        for run, why in _held_back(runs)
        for measurement in run.measurements
    }
    return tuple(
        CheckedMeasurement(measurement, reasons.get(id(measurement), "")) for measurement in given
    )


def _runs_by_class(measurements: Sequence[Measurement]) -> dict[OperatorClass, list[_Run]]:
    """Return the runs of each operator class, sorted by log ratio."""
    grouped: dict[tuple[OperatorClass, object], list[Measurement]] = defaultdict(list)
    for index, measurement in enumerate(measurements):
        grouped[
            measurement.operator_class, index if measurement.job is None else measurement.job
        ].append(measurement)
    runs_by_class: dict[OperatorClass, list[_Run]] = defaultdict(list)
    for (name, _), of_run in grouped.items():
        runs_by_class[name].append(_Run(median(map(_log_ratio, of_run)), tuple(of_run)))
    return {
        name: sorted(runs, key=lambda run: run.log_ratio) for name, runs in runs_by_class.items()
    }


def _log_ratio(measurement: Measurement) -> float:
    return math.log(
        min(max(measurement.measured / measurement.predicted, 1 / MAX_RATIO), MAX_RATIO)
    )


def _held_back(runs: Sequence[_Run]) -> list[tuple[_Run, str]]:
    """Return the runs of a class that do not count, each with the reason."""
    logs = [run.log_ratio for run in runs]
    centre = median(logs)
    deviation = MAD_TO_SPREAD * median(abs(each - centre) for each in logs)
    furthest = max(OUTLIER_LEAST, OUTLIER_DEVIATIONS * deviation)
    held_back = []
    for index, run in enumerate(runs):
        others = logs[:index] + logs[index + 1 :]
        is_confirmed = any(abs(each - run.log_ratio) <= AGREES for each in others)
        if len(runs) >= OUTLIER_RUNS and abs(run.log_ratio - centre) > furthest:
            than = f"than the median of {len(runs)} runs here, which it contradicts"
            held_back.append((run, f"{_ratio_text(run.log_ratio - centre)} {than}"))
        elif abs(run.log_ratio) > UNCONFIRMED and not is_confirmed:
            than = "than predicted, and no other run here agrees with it within a factor of 2"
            held_back.append((run, f"{_ratio_text(run.log_ratio)} {than}"))
    return held_back


def _ratio_text(log_ratio: float) -> str:
    """Return a log ratio as text."""
    return f"{math.exp(abs(log_ratio)):.1f} times {'more' if log_ratio > 0 else 'less'}"


def _factor(logs: Sequence[float]) -> CalibrationFactor:
    """Return the factor of a class from its runs' log ratios.

    The weight of the runs is t^2 / (t^2 + s^2 / n): t is the prior's spread, s the runs' own
    spread, estimated with PRIOR_RESIDUALS residuals from the prior, n the number of runs. A single
    run is clipped about the prior, so that it moves a factor by at most 37 %; several runs are
    clipped about their median.

    Source: Gelman et al., Bayesian Data Analysis (2013), sections 2.5 and 5.4; Huber, Robust
    Estimation of a Location Parameter (1964).
    """
    count = len(logs)
    start = median(logs) if count > 1 else 0.0
    deviation = MAD_TO_SPREAD * median(abs(each - start) for each in logs) if count > 1 else 0.0
    reach = CLIP_SPREADS * max(math.hypot(PRIOR_SPREAD, PRIOR_SPREAD), deviation)
    clipped = [min(max(each - start, -reach), reach) for each in logs]
    centre = start + math.fsum(clipped) / count
    own = PRIOR_RESIDUALS * PRIOR_SPREAD**2 + math.fsum((each - centre) ** 2 for each in logs)
    variance = own / (PRIOR_RESIDUALS + count - 1)
    share = PRIOR_SPREAD**2 / (PRIOR_SPREAD**2 + variance / count)
    shrunk = share * centre
    spread = math.sqrt(math.fsum((each - shrunk) ** 2 for each in logs) / count)
    return CalibrationFactor(factor=math.exp(shrunk), n=count, spread=spread)


def _digest(measurements: tuple[Measurement, ...]) -> str:
    lines = sorted(measurement.model_dump_json() for measurement in measurements)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def measurements_of(
    request: EstimateRequest,
    measured: Mapping[str, float],
    *,
    host: str,
    measured_at: str | None = None,
    job: str | None = None,
) -> tuple[Measurement, ...]:
    """Return a finished job's measurements, each attributed to one operator class.

    ``measured`` has figures by the planner's names: ``ttft_seconds``, ``tpot_seconds``,
    ``step_seconds``, ``duration_seconds``, ``per_device_peak_bytes``; others are ignored. The
    prediction is recomputed without the host's calibration, so that factors never compound.
    """
    prior = estimate(request.model_copy(update={"host_calibration": None}))
    measurements = []
    for metric, value in measured.items():
        attributed = _attributed(prior, metric, value)
        if attributed is None:
            continue
        operator_class, predicted, actual = attributed
        measurements.append(
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
    return tuple(measurements)


def _attributed(
    prior: Estimate, metric: str, value: float
) -> tuple[OperatorClass, float, float] | None:
    """Return a figure's dominating class with its predicted and measured part."""
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
