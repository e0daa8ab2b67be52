"""The result of costing a workload: figures with intervals, energy, cost and carbon."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeGuard

from planner.catalog.engines import spread_of
from planner.catalog.reading import data_toml
from planner.cost.memory import MemoryUse
from planner.cost.quantity import Ledger, Line, Origin, any_of, is_column, where
from planner.cost.roofline import (
    MILLION,
    drawn_watts,
    joules_per_token,
    of_electricity,
    run_joules,
    run_usd,
    usd_per_million_tokens,
)
from planner.cost.weights import RECIPES
from planner.specs.estimate import (
    CalibrationFactor,
    ErrorClass,
    Interval,
    MemoryAnswer,
    Performance,
)
from planner.specs.workload import CompressWorkload, GenerateWorkload, ServeWorkload, TrainWorkload
from planner.workload.setting import Setting

BOUND_NAMES = ("compute", "memory_bandwidth", "communication", "overhead")


def performance_of(**figures: float | None) -> Performance:
    """Return a Performance; columns are not validated."""
    if is_column(*figures.values()):
        return Performance.model_construct(**figures)  # type: ignore[arg-type]  # columns are no numbers
    return Performance.model_validate(figures)


class Admission(NamedTuple):
    """The seconds of a mean time to first token that no simulation of steps shows.

    All requests wait ``same_s``; until the engine looks for new ones they wait ``looks_s`` on
    average, any time up to twice that being as likely.
    """

    same_s: float = 0.0
    looks_s: float = 0.0


AT_ONCE = Admission()


@dataclass(frozen=True)
class Outcome:
    """Memory, performance and time breakdown of a workload.

    ``seconds_by_class`` is the main step's time by operator class; ``phases`` the same for each
    phase that a job can measure separately; ``stage_layers`` and ``stage_devices`` are the split
    of an uneven pipeline; ``admission`` is what passes before a step can read a prompt.
    """

    memory: MemoryUse
    performance: Performance
    seconds_by_class: Mapping[str, float]
    fits: bool
    phases: Mapping[str, Mapping[str, float]]
    energy_tokens_per_second: float | None = None
    warnings: tuple[str, ...] = field(default=())
    stage_layers: tuple[int, ...] = ()
    stage_devices: tuple[str, ...] = ()
    admission: Admission = AT_ONCE

    @property
    def bound_by(self) -> str:
        """Return the resource that takes the most time, or memory if it does not fit."""
        if not self.fits:
            return "memory_capacity"
        return max(BOUND_NAMES, key=lambda name: self.seconds_by_class.get(name, 0.0))


# Uncertainty of an estimate: its error class and an 80 % interval around each figure.
#
# The widths of the two uncalibrated classes are the errors of comparable planners on measured
# serving sweeps of models and devices outside their fit; the width of a calibrated host follows
# from the residuals of its own measurements.


MIN_MEASUREMENTS = 3
Z_80 = 1.2816  # the 90 % quantile of the normal distribution bounds 80 % from both sides
# Log spread of a time or a rate, and of memory, by class. On unseen pairs of model and device, the
# error is about 20 % for mean TPOT, about 50 % for TTFT, whose queue no benchmark states, and
# about 10 % for memory.
TIME_SPREAD: dict[ErrorClass, float] = {
    "datasheet only": 0.25,
    "same family": 0.22,
    "calibrated on this host": 0.05,
}
QUEUE_SPREAD = 0.90
# Log spread by which others serve slower than the campaigns of the fit, beside the errors within
# these: other people's prompts, releases and hosts. The campaigns are those of vendors, who tune
# their launches: nobody else was faster by more than the errors within. It is found on 52
# published speeds of eleven sources that no factor saw (planner/fitting/published_speeds.py).
SOURCE_SPREAD = 0.39
MEMORY_SPREAD: dict[ErrorClass, float] = {
    "datasheet only": 0.10,
    "same family": 0.07,
    "calibrated on this host": 0.03,
}
# Log spread of steps with completions of the policy's own, of mixtures of experts: 30 published
# rows that no factor of serving or training was fitted to (planner/fitting/on_policy.py). Dense
# models, of 8 rows, are off no further than their training steps.
SPARSE_ON_POLICY_SPREAD = 0.46
GENERIC_WIDENING = 1.25
Phases = Mapping[str, Mapping[str, float]]  # seconds of each operator class in each phase
# Memory that is counted, not modelled.
EXACT_CLASSES = (
    "weights",
    "reference_weights",
    "kv_cache",
    "gradients",
    "optimizer_states",
    "adapters",
)
RATE_FIELDS = (
    "tokens_per_second",
    "output_tokens_per_second",
    "prefill_tokens_per_second",
    "decode_tokens_per_second",
    "requests_per_second",
    "ttft_seconds",
    "tpot_seconds",
    "latency_seconds",
    "prefill_seconds",
    "step_seconds",
    "duration_seconds",
    "mfu",
)
TIME = "_seconds"  # the end of a time's name; others of these fields are rates
FIELDS_OF_PASS = {
    "prefill": ("prefill_tokens_per_second", "prefill_seconds", "ttft_seconds"),
    "decode": (
        "tokens_per_second",
        "output_tokens_per_second",
        "decode_tokens_per_second",
        "requests_per_second",
        "tpot_seconds",
        "latency_seconds",
    ),
}


@dataclass(frozen=True)
class Confidence:
    """The error class of an estimate and the log spreads that follow from it.

    Those of times and rates count both ways; by ``slower_spread`` they may be slower alone.
    """

    error_class: ErrorClass
    time_spread: float
    memory_spread: float
    slower_spread: float = 0.0
    serving_spreads: Mapping[str, float] = field(default_factory=dict)
    pass_spreads: Mapping[str, float] = field(default_factory=dict)

    def interval(self, value: float, spread: float) -> Interval:
        """Return the 80 % interval of a figure whose log error has this spread."""
        reach = math.exp(Z_80 * spread)
        return value / reach, value * reach

    def interval_of_speed(self, name: str, value: float, spread: float) -> Interval:
        """Return the 80 % interval of a time or a rate, which reaches further to the slow side."""
        faster = math.exp(Z_80 * spread)
        slower = math.exp(Z_80 * math.hypot(spread, self.slower_spread))
        if name.endswith(TIME):
            return value / faster, value * slower
        return value / slower, value * faster


def confidence_of(setting: Setting, phases: Phases | None = None) -> Confidence:
    """Return the confidence of an estimate of this setting, whose phases took these seconds."""
    factors = _measured_factors(setting, phases or {})
    error_class = _error_class(setting, factors)
    widening = GENERIC_WIDENING if setting.engine.is_generic else 1.0
    counts = [factor.n if factor else 0 for factor in factors]
    of_this_host = bool(counts) and min(counts) >= MIN_MEASUREMENTS
    residual = _residual(factors) if error_class == "calibrated on this host" else 0.0
    elsewhere = 0.0 if of_this_host else SOURCE_SPREAD
    if not isinstance(setting.workload, ServeWorkload):
        elsewhere = 0.0  # the errors of other workloads are those of unseen sources already
    times = math.hypot(_time_spread(setting, error_class), residual)
    return Confidence(
        error_class=error_class,
        time_spread=times * widening,
        slower_spread=elsewhere * widening,
        memory_spread=_memory_spread(setting, error_class) * widening,
        serving_spreads={} if of_this_host else _serving_spreads(setting, widening),
        pass_spreads={} if of_this_host else _pass_spreads(setting),
    )


def _pass_spreads(setting: Setting) -> dict[str, float]:
    """Return the log spreads of each pass of single streams.

    Those that one source measured on one device are as wide as single streams are off in sources
    that no fit has seen; engines without factors of other workloads have been measured here.
    """
    if not isinstance(setting.workload, GenerateWorkload | ServeWorkload):
        return {}
    lone = dict.fromkeys(setting.lone_streams, setting.engine.lone_stream_spread)
    known = setting.stream_spreads if setting.keeps_published_factors else {}
    return {
        name: max(lone.get(group, 0.0), known.get(group, 0.0))
        for group, names in FIELDS_OF_PASS.items()
        for name in names
    }


def _serving_spreads(setting: Setting, widening: float) -> dict[str, float]:
    """Return the log spreads of TTFT and TPOT: errors held out in sweeps.

    They are the engine's errors: measured rates of the device do not change them.
    """
    engine = setting.engine
    spreads_by_time = {"tpot_seconds": engine.tpot_spreads, "ttft_seconds": engine.ttft_spreads}
    error_class = "same family" if setting.pair in engine.fitted_groups else "datasheet only"
    key = f"{error_class}, sparse" if setting.model.is_moe else error_class
    return {
        name: spreads.get(key, spreads[error_class]) * widening
        for name, spreads in spreads_by_time.items()
        if error_class in spreads
    }


def _measured_factors(setting: Setting, phases: Phases) -> list[CalibrationFactor | None]:
    """Return the host's factor of the operators that take most of each phase, None if unmeasured.

    What a job measures of a phase is attributed to these operators; a factor of others says
    nothing about the estimate's error.
    """
    host = setting.host_calibration
    measured = {str(name): factor for name, factor in host.factors.items()} if host else {}
    uncalibrated = [
        {
            name: value / (measured[name].factor if name in measured else 1.0)
            for name, value in seconds.items()
        }
        for seconds in phases.values()
        if any(seconds.values())
    ]
    return [measured.get(max(seconds, key=seconds.__getitem__)) for seconds in uncalibrated]


def _time_spread(setting: Setting, error_class: ErrorClass) -> float:
    """Return the log spread of times: the engine's held-out error, or the class default."""
    workload = setting.workload
    training = isinstance(workload, TrainWorkload)
    if isinstance(workload, CompressWorkload) and not setting.is_measured:
        return spread_of(RECIPES[workload.method].method_group)
    if isinstance(workload, TrainWorkload) and setting.engine.step_spreads:
        in_fit = setting.device.architecture in setting.engine.trained_on
        steps = _held_out_spread(setting.engine.step_spreads, seen=in_fit)
        widens = workload.generates and setting.model.is_moe
        return max(steps, SPARSE_ON_POLICY_SPREAD) if widens else steps
    spreads = setting.stream_spreads
    if not training and "decode" in spreads and setting.keeps_published_factors:
        return spreads["decode"]
    return TIME_SPREAD[error_class]


def _held_out_spread(spreads: Mapping[str, float], *, seen: bool) -> float:
    """Return the held-out error for an architecture in the fit, or for one outside it."""
    unseen = spreads["datasheet only"]
    return spreads.get("same family", unseen) if seen else unseen


def _memory_spread(setting: Setting, error_class: ErrorClass) -> float:
    """Return the log spread of peak memory: held-out error, or the class default."""
    training = isinstance(setting.workload, TrainWorkload)
    fitted = setting.engine.memory_spreads if training else setting.engine.generation_spreads
    if fitted and (training or isinstance(setting.workload, GenerateWorkload)):
        return _held_out_spread(fitted, seen=True)
    return MEMORY_SPREAD[error_class]


def _error_class(setting: Setting, factors: Sequence[CalibrationFactor | None]) -> ErrorClass:
    counts = [factor.n for factor in factors if factor]
    if counts and max(counts) >= MIN_MEASUREMENTS:
        return "calibrated on this host"
    if counts or setting.is_measured or setting.pair in setting.engine.fitted_groups:
        return "same family"
    return "datasheet only"


def _residual(factors: Sequence[CalibrationFactor | None]) -> float:
    """Return the root mean square of the residuals of the measured factors."""
    known = [factor for factor in factors if factor]
    total = sum(factor.n for factor in known)
    return math.sqrt(sum(factor.n * factor.spread**2 for factor in known) / total)


def _spread_of(name: str, confidence: Confidence, *, queued: bool) -> float:
    fitted = confidence.serving_spreads.get(name)
    least = confidence.pass_spreads.get(name, 0.0)
    if fitted is not None and queued:
        return max(fitted, least)
    if name != "ttft_seconds" or not queued:
        return max(confidence.time_spread, least)
    return math.hypot(max(confidence.time_spread, least), QUEUE_SPREAD)


def intervals_of(
    confidence: Confidence, performance: Performance, memory: MemoryAnswer, *, queued: bool
) -> dict[str, Interval]:
    """Return the 80 % interval of every figure that has one.

    If ``queued``, requests queue and the time to first token depends on the arrivals.
    """
    intervals = {
        name: confidence.interval_of_speed(
            name, value, _spread_of(name, confidence, queued=queued)
        )
        for name in RATE_FIELDS
        if (value := getattr(performance, name)) is not None
    }
    # Weights and caches are exact; only the engine's additional memory is uncertain.
    peak = memory.per_device_peak_bytes
    exact = sum(memory.breakdown_bytes.get(name, 0) for name in EXACT_CLASSES)
    low, high = confidence.interval(float(peak), confidence.memory_spread)
    intervals["per_device_peak_bytes"] = (max(low, float(min(exact, peak))), high)
    return intervals


# Energy, cost and carbon of a workload, with intervals.


GROUP = "energy"
LOW, EXPECTED, HIGH = range(3)


@dataclass(frozen=True)
class Expense:
    """Figures of an estimate by name, and their intervals."""

    figures: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, Interval] = field(default_factory=dict)


def active_ratio(outcome: Outcome, which: int = EXPECTED) -> float:
    """Return the mean share of the dynamic power over the outcome's operator classes."""
    table: dict[str, list[float]] = data_toml("power.toml")["active"]
    seconds = {name: outcome.seconds_by_class.get(name, 0.0) for name in table}
    total = sum(seconds.values())
    drawn = sum(table[name][which] * share for name, share in seconds.items())
    busy = total > 0
    return where(busy, drawn / where(busy, total, 1.0), table["compute"][which])


def expense(setting: Setting, outcome: Outcome, ledger: Ledger, rented: float) -> Expense:
    """Return energy, cost and carbon per token and, if the run is finite, per run."""
    figures: dict[str, float] = {}
    energy = _energy(setting, outcome, ledger)
    figures |= energy.figures | _money(setting, outcome, ledger, rented)
    figures |= _electricity(setting, energy.figures, ledger)
    return Expense(figures, energy.intervals)


def _is_positive(figure: float | None) -> TypeGuard[float]:
    """Return whether a figure exists and is positive for any element."""
    return figure is not None and any_of(figure > 0)


def _energy(setting: Setting, outcome: Outcome, ledger: Ledger) -> Expense:
    device, idle = setting.device, float(data_toml("power.toml")["idle_ratio"])
    if not device.tdp_watts:
        return Expense()
    origin = Origin("published", data_toml("power.toml")["sources"]["active"])
    watts = ledger.term(
        drawn_watts,
        Line(GROUP, "Mean power of a device", origin=origin),
        power_watts=device.tdp_watts,
        idle_ratio=idle,
        active_ratio=active_ratio(outcome),
    )
    count, rate = setting.devices_in_use, outcome.energy_tokens_per_second
    figures: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    name = "energy_joules_per_token"
    if _is_positive(rate):
        figures[name] = ledger.term(
            joules_per_token,
            Line(GROUP, "Energy per token", origin=Origin("published", device.source or "")),
            num_devices=count,
            power_watts=watts,
            tokens_per_s=rate,
        )
    if ledger.records and name in figures:
        low, high = (
            float(
                drawn_watts(
                    power_watts=device.tdp_watts,
                    idle_ratio=idle,
                    active_ratio=active_ratio(outcome, which),
                )
            )
            / watts
            for which in (LOW, HIGH)
        )
        intervals[name] = (figures[name] * low, figures[name] * high)
    if _is_positive(outcome.performance.duration_seconds):
        figures["run_energy_joules"] = ledger.term(
            run_joules,
            Line(GROUP, "Energy of the run"),
            num_devices=count,
            power_watts=watts,
            duration_s=outcome.performance.duration_seconds,
        )
    return Expense(figures, intervals)


def _money(setting: Setting, outcome: Outcome, ledger: Ledger, rented: float) -> dict[str, float]:
    device, rate = setting.device, outcome.energy_tokens_per_second
    if not device.price_usd_per_hour:
        return {}
    origin = Origin("published", device.price_source or device.source or "")
    figures: dict[str, float] = {}
    if _is_positive(rate):
        figures["cost_usd_per_million_tokens"] = ledger.term(
            usd_per_million_tokens,
            Line(GROUP, "Cost per million tokens", origin=origin),
            num_devices=rented,
            hourly_usd=device.price_usd_per_hour,
            tokens_per_s=rate,
        )
    if _is_positive(outcome.performance.duration_seconds):
        figures["run_cost_usd"] = ledger.term(
            run_usd,
            Line(GROUP, "Cost of the run", origin=origin),
            num_devices=rented,
            hourly_usd=device.price_usd_per_hour,
            duration_s=outcome.performance.duration_seconds,
        )
    return figures


def _electricity(setting: Setting, energy: dict[str, float], ledger: Ledger) -> dict[str, float]:
    """Return carbon and price of the electricity if the cluster has grid data."""
    cluster, figures = setting.cluster, dict[str, float]()
    amounts = {
        "per_million_tokens": energy.get("energy_joules_per_token", 0.0) * MILLION,
        "of_the_run": energy.get("run_energy_joules", 0.0),
    }
    rates = {
        "carbon_grams": (cluster.grid_gco2_per_kwh, "Carbon of the electricity"),
        "electricity_usd": (cluster.electricity_usd_per_kwh, "Price of the electricity"),
    }
    for quantity, (per_kwh, title) in rates.items():
        for span, joules in amounts.items():
            if per_kwh is None or not _is_positive(joules):
                continue
            name = f"{quantity}_{span}" if span == "per_million_tokens" else f"run_{quantity}"
            figures[name] = ledger.term(
                of_electricity,
                Line(GROUP, f"{title}, {span.replace('_', ' ')}", key=name),
                energy_joules=joules,
                per_kwh=per_kwh,
            )
    return figures
