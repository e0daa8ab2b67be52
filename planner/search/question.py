"""A plan request with resolved names, its limits, and the reasons of rejected strategies."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast, get_args

from planner.catalog.engines import AUTO, PREFERENCE_ENGINE, engines_for, serving_engine
from planner.catalog.gguf import USUAL_TYPES
from planner.specs.base import Dtype, JsonObject
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import (
    APPLICABILITY,
    MEMORY,
    OWN_FIGURES,
    Bound,
    Estimate,
    EstimateRequest,
    PlanRequest,
    Rejection,
)
from planner.specs.model import ModelSpec
from planner.specs.units import GIB
from planner.specs.workload import (
    AWAY_TITLES,
    GenerateWorkload,
    OffloadSpec,
    ServeWorkload,
    Strategy,
    TrainWorkload,
)
from planner.techniques.registry import Case
from planner.workload.cluster import resolve_cluster, resolve_device
from planner.workload.device_groups import clusters_by_node_kind
from planner.workload.layouts import Layout
from planner.workload.resolve import resolve_model


@dataclass(frozen=True)
class Question:
    """A plan request with resolved names, on one of its clusters.

    ``shown`` is the cluster as requested: a catalog id remains an id.
    """

    request: PlanRequest
    model: ModelSpec
    device: DeviceSpec
    cluster: ClusterSpec
    shown: ClusterSpec

    @property
    def hardware(self) -> tuple[str, str]:
        """Return the device ids and the cloud offer of the question."""
        others = (cast("DeviceSpec", group.device).id for group in self.cluster.other_nodes)
        return " + ".join((self.device.id, *others)), self.cluster.instance or ""

    @property
    def compared(self) -> tuple[str, ...]:
        """Return what plans of one strategy family may differ in: the hardware and the engine."""
        return *self.hardware, self.request.engine or ""

    @property
    def devices(self) -> tuple[DeviceSpec, ...]:
        """Return all kinds of device in the cluster."""
        others = (cast("DeviceSpec", group.device) for group in self.cluster.other_nodes)
        return (self.device, *others)

    @property
    def case(self) -> Case:
        """Return the case that technique conditions are checked against."""
        return Case(self.model, self.device, self.cluster, self.request.workload)

    @cached_property
    def pinned(self) -> JsonObject:
        """Return the pinned strategy fields."""
        return self.request.pins.stated

    def estimate_request(self, strategy: Strategy) -> EstimateRequest:
        """Return the request that costs one strategy of this question."""
        request = self.request
        return EstimateRequest.model_construct(
            id=request.id,
            model=self.model,
            cluster=self.cluster,
            workload=request.workload,
            strategy=strategy,
            engine=request.engine,
            host_calibration=request.host_calibration,
        )


def clusters_of(request: PlanRequest) -> tuple[ClusterSpec, ...]:
    """Return the candidate clusters of a request: its options, or its only cluster."""
    return request.hardware_options or (request.cluster,)


def memory_of(cluster: ClusterSpec) -> int:
    """Return the device memory of a whole cluster, in bytes.

    Raises:
        PlannerError: a name is unknown.
    """
    resolved = resolve_cluster(cluster)
    own = resolve_device(resolved.device).memory_bytes * resolved.devices_per_node * resolved.nodes
    others = resolved.other_nodes
    return own + sum(
        resolve_device(group.device).memory_bytes * group.num_devices for group in others
    )


def questions(request: PlanRequest) -> Iterator[Question]:
    """Yield one question per candidate cluster and, if the engine is ``auto``, per engine.

    For serving and generation on mixed nodes, also yield the nodes of each kind alone.

    Raises:
        PlannerError: a name is unknown.
    """
    model = resolve_model(request.named_model)
    can_split = isinstance(request.workload, ServeWorkload | GenerateWorkload)
    for cluster in clusters_of(request):
        for named in engine_requests(request, cluster):
            yield _question(named, model, cluster)
            for part in (
                clusters_by_node_kind(cluster) if can_split and cluster.other_nodes else ()
            ):
                yield _question(named, model, part)


def engine_requests(request: PlanRequest, cluster: ClusterSpec) -> Iterator[PlanRequest]:
    """Yield the request for each engine to compare on a cluster: its own, or those of ``auto``.

    Raises:
        PlannerError: the device is unknown.
    """
    for engine in engines_of(request, cluster):
        yield request.model_copy(update={"engine": engine})


def engines_of(request: PlanRequest, cluster: ClusterSpec) -> tuple[str | None, ...]:
    """Return the engines to compare on a cluster: the request's own, or those of ``auto``.

    Raises:
        PlannerError: the device is unknown.
    """
    if request.engine != AUTO:
        return (request.engine,)
    device = resolve_device(resolve_cluster(cluster).device)
    if isinstance(request.workload, TrainWorkload) and request.workload.compares:
        return (PREFERENCE_ENGINE,)
    engines = engines_for(device, training=isinstance(request.workload, TrainWorkload))
    if (request.pins.quantization or "").startswith("gguf:"):
        # Others load such files in part, by plugins, for few architectures.
        return tuple(e for e in engines if serving_engine(e).loads_gguf_alone) or engines
    return engines


def _question(request: PlanRequest, model: ModelSpec, requested_cluster: ClusterSpec) -> Question:
    cluster = resolve_cluster(requested_cluster)
    device = resolve_device(cluster.device)
    expanded = cluster.model_copy(update={"device": device.id})
    is_plain = requested_cluster.instance is None and requested_cluster.topology is None
    shown = requested_cluster if is_plain else expanded
    return Question(request, model, device, cluster, shown)


# Limits on an estimate's figures: read a figure by name and report the first violation.


# Figures that only a simulation gives. The search simulates where the mean does not decide.
SIMULATED_OTHERS = frozenset(
    {
        "slo_attainment_ratio",
        "slo_max_concurrency",
        "slo_max_requests_per_second",
        "max_requests_per_second",
    }
)
PERCENTILE = re.compile(r"(ttft|tpot|latency)_p(\d+)_seconds")
# Factors above a percentile's limit at which the mean alone proves a violation. The smallest
# percentiles of 1,477 random loads were 0.13, 0.41, 0.83 and 0.97 of their mean.
FAR_BEYOND = {50: 16.0, 90: 4.0, 95: 2.0, 99: 1.25}
UNITS = {"_seconds": "s", "_bytes": "B", "_per_second": "1/s", "_usd": "USD"}


def figure(estimate: Estimate, name: str) -> float | None:
    """Return one figure of an estimate by its constraint name, or None if it has none."""
    if name == "per_device_peak_bytes":
        return float(estimate.memory.per_device_peak_bytes)
    if name == "quality_loss_ratio":
        return estimate.quality.loss_ratio if estimate.quality else 0.0
    source = estimate if name in OWN_FIGURES else estimate.performance
    value = getattr(source, name)
    return None if value is None else float(value)


def is_simulated(name: str) -> bool:
    """Return whether only a simulation of the load gives a figure."""
    return name in SIMULATED_OTHERS or is_percentile(name)


def is_percentile(name: str) -> bool:
    """Return whether a figure is a percentile of request latencies."""
    return PERCENTILE.fullmatch(name) is not None


def mean_bound(name: str, bound: Bound) -> tuple[str, float] | None:
    """Return a percentile's mean figure and the value above which it violates the limit.

    >>> mean_bound("ttft_p99_seconds", Bound(max=0.5))
    ('ttft_seconds', 0.625)
    """
    match = PERCENTILE.fullmatch(name)
    if match is None or bound.max is None:
        return None
    return f"{match[1]}_seconds", FAR_BEYOND[int(match[2])] * bound.max


def unit_of(name: str) -> str:
    """Return the unit of a figure, from the suffix of its name."""
    return next((unit for suffix, unit in UNITS.items() if name.endswith(suffix)), "")


ABBREVIATIONS = {"ttft": "TTFT", "tpot": "TPOT", "slo": "SLO", "mfu": "MFU"}


def words_of(name: str) -> str:
    """Return the field's words for a figure, without its unit.

    >>> words_of("ttft_p95_seconds"), words_of("per_device_peak_bytes")
    ('TTFT p95', 'per device peak')
    >>> words_of("tokens_per_second")
    'tokens per second'
    """
    stem = next(
        (name.removesuffix(end) for end in ("_seconds", "_bytes") if name.endswith(end)), ""
    )
    return " ".join(ABBREVIATIONS.get(word, word) for word in (stem or name).split("_"))


def value_words(name: str, value: float) -> str:
    """Return a figure's value with its unit; seconds below one are in milliseconds.

    >>> value_words("ttft_p95_seconds", 0.3431), value_words("per_device_peak_bytes", 2.0**31)
    ('343 ms', '2 GiB')
    >>> value_words("tokens_per_second", 1234.5)
    '1234'
    """
    if name.endswith("_seconds"):
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.4g} s"
    return f"{value / GIB:.4g} GiB" if name.endswith("_bytes") else f"{value:.4g}"


RATE_ROUNDING = 1e-9  # of the sum of the rates of several kinds of replicas


def constraints_of(request: PlanRequest) -> dict[str, Bound]:
    """Return the request's constraints together with the workload's service objectives.

    Arrivals that are not served queue without end, so the rate is an objective too.
    """
    limits = dict(request.constraints)
    workload = request.workload
    if isinstance(workload, ServeWorkload):
        for name, limit in (
            ("ttft_seconds", workload.ttft_slo_seconds),
            ("tpot_seconds", workload.tpot_slo_seconds),
        ):
            # A limit on a percentile of the same figure replaces the limit on the mean.
            percentile_prefix = name.replace("_seconds", "_p")
            if limit is not None and not any(
                constraint.startswith(percentile_prefix) for constraint in limits
            ):
                limits.setdefault(name, Bound(max=limit))
        rate = workload.request_rate_per_second
        if rate is not None:
            served = Bound(min=rate * (1 - RATE_ROUNDING))
            limits = {"requests_per_second": served, **limits}  # the cause of long waits
    return limits


def first_violation(
    estimate: Estimate, limits: Mapping[str, Bound]
) -> tuple[str, float | None, float] | None:
    """Return the first violated constraint: its name, the value and the limit.

    A percentile that was not simulated, though its mean does not exceed it, violates only where no
    other constraint does: another one was the reason not to simulate.
    """
    unknown: tuple[str, float | None, float] | None = None
    for name, bound in limits.items():
        violated = violation(figure(estimate, name), bound)
        if violated is None:
            continue
        if violated[0] is None and _mean_may_do(estimate, name, bound):
            unknown = unknown or (name, *violated)
            continue
        return name, *violated
    return unknown


def _mean_may_do(estimate: Estimate, name: str, bound: Bound) -> bool:
    """Return whether a percentile's mean is known and does not prove that it exceeds its limit."""
    far = mean_bound(name, bound)
    mean = None if far is None else figure(estimate, far[0])
    return far is not None and mean is not None and mean <= far[1]


def violation(value: float | None, bound: Bound) -> tuple[float | None, float] | None:
    """Return a value and the limit that it violates, or None; an unknown value violates any."""
    if bound.max is not None and (value is None or value > bound.max):
        return value, bound.max
    if bound.min is not None and (value is None or value < bound.min):
        return value, bound.min
    return None


# Reasons for rejected strategies by family, each with the numbers of its closest miss.


DTYPES = get_args(Dtype)
OFFLOADS = ("none", "cpu", "nvme")
LARGEST_GROUP = 4096
MAX_FAMILIES = 32


def strategy_family_of(strategy: Strategy) -> str:
    """Return a strategy's family: weight format, parallel sizes and offloaded tensors."""
    packed = strategy.quantization if _packed_number(strategy) else None
    parts = [f"{packed or strategy.weight_dtype or strategy.compute_dtype} weights"]
    for size, name in (
        (strategy.tensor_parallel_size, "tensor"),
        (strategy.pipeline_parallel_size, "pipeline"),
        (strategy.context_parallel_size, "context"),
    ):
        if size and size > 1:
            parts.append(f"{name} parallel {size}")
    if strategy.zero_stage:
        parts.append(f"ZeRO {strategy.zero_stage}")
    if strategy.activation_recomputation == "full":
        parts.append("full recomputation")
    return ", ".join((*parts, *strategy.offload_places))


def _packed_number(strategy: Strategy) -> int:
    """Return a number for the type of a packed file, 0 for other formats.

    Types outside those that a search chooses are pinned, so that one search has one of them.
    """
    method, colon, kind = (strategy.quantization or "").partition(":")
    if not colon:
        return 0
    return 1 + (
        USUAL_TYPES.index(kind) if method == "gguf" and kind in USUAL_TYPES else len(USUAL_TYPES)
    )


def strategy_family_numbers(strategy: Strategy, layout: Layout) -> float:
    """Return the strategy family of each strategy as a number, for columns of layouts.

    Numbers differ exactly where ``strategy_family_of`` differs: every part has its own digits.
    """
    number: float = DTYPES.index(strategy.weight_dtype or strategy.compute_dtype or "fp32")
    offload = strategy.offload or OffloadSpec()
    parts: tuple[tuple[float, int], ...] = (
        (_packed_number(strategy), len(USUAL_TYPES) + 2),
        (layout.tensor, LARGEST_GROUP),
        (layout.pipeline, LARGEST_GROUP),
        (layout.context, LARGEST_GROUP),
        (layout.zero_stage, 4),
        (strategy.activation_recomputation == "full", 2),
        (OFFLOADS.index(offload.optimizer), len(OFFLOADS)),
        *((getattr(offload, name) > 0, 2) for name in AWAY_TITLES),
    )
    for part, radix in parts:
        number = number * radix + part
    return number


@dataclass
class Rejections:
    """Collect rejections, keeping the one closest to its limit per strategy family.

    ``names_engines`` keeps the families of several engines apart.
    """

    by_family: dict[str, Rejection] = field(default_factory=dict)
    names_engines: bool = False

    def _named(self, family: str, engine: str | None) -> str:
        return f"{family}, {engine}" if self.names_engines and engine else family

    def add_technique(self, key: str, reason: str, engine: str | None = None) -> None:
        """Add a technique that does not apply, or a format or layout that an engine refuses."""
        key = self._named(key, engine)
        self.by_family[key] = Rejection(family=key, constraint=APPLICABILITY, reason=reason)

    def add_memory(self, estimate: Estimate, usable_bytes: float, strategies: int = 1) -> None:
        """Add a strategy that exceeds the device memory."""
        required = float(estimate.memory.per_device_peak_bytes)
        largest = max(estimate.memory.breakdown_bytes.items(), key=lambda item: item[1])
        name, share = largest
        words = name.replace("_", " ").replace("kv ", "the KV ")
        takes = "take" if words.endswith("s") else "takes"
        reason = (
            f"needs {required / GIB:.1f} GiB per device, {usable_bytes / GIB:.1f} GiB are usable; "
            f"{words} {takes} {share / GIB:.1f} GiB"
        )
        self._add(
            estimate, LimitViolation(MEMORY, reason, required, usable_bytes, "B"), strategies
        )

    def add_constraint(
        self, estimate: Estimate, miss: tuple[str, float | None, float], strategies: int = 1
    ) -> None:
        """Add a strategy that violates a constraint of the request."""
        name, value, limit = miss
        unit = unit_of(name)
        shown = "unknown" if value is None else f"{value:.4g} {unit}".strip()
        reason = f"{name} is {shown}, the limit is {limit:g} {unit}".strip()
        if value is not None and is_percentile(name):
            shown, most = value_words(name, value), value_words(name, limit)
            reason = f"{words_of(name)} is {shown}, the limit is {most}"
        if value is None and is_simulated(name):
            value, reason = _without_percentiles(estimate, name, limit)
        self._add(estimate, LimitViolation(name, reason, value, limit, unit), strategies)

    def _add(self, estimate: Estimate, miss: "LimitViolation", strategies: int) -> None:
        family = self._named(strategy_family_of(estimate.strategy), estimate.engine)
        previous = self.by_family.get(family)
        count = (previous.strategies if previous else 0) + strategies
        if previous and previous.required is not None and not miss.closer_than(previous):
            self.by_family[family] = previous.model_copy(update={"strategies": count})
            return
        self.by_family[family] = Rejection(
            family=family,
            constraint=miss.constraint,
            reason=miss.reason,
            required=miss.required,
            limit=miss.limit,
            unit=miss.unit,
            strategies=count,
        )

    def result(self) -> dict[str, Rejection]:
        """Return the techniques that do not apply, then rejected strategy families."""
        rejected = self.by_family.values()
        techniques = [each for each in rejected if each.constraint == APPLICABILITY]
        families = [each for each in rejected if each.constraint != APPLICABILITY]
        closest = sorted(families, key=relative_violation)[:MAX_FAMILIES]
        return {rejection.family: rejection for rejection in (*techniques, *closest)}


def _without_percentiles(estimate: Estimate, name: str, limit: float) -> tuple[float | None, str]:
    """Return the mean that already violates the limit, or report an overloaded queue."""
    far = mean_bound(name, Bound(max=limit))
    most = estimate.performance.max_requests_per_second
    if most is not None or far is None:
        served = "" if most is None else f", the most is {most:.3g} a second"
        return (
            None,
            f"more requests come than can be served{served}: {words_of(name)} has no value",
        )
    mean = figure(estimate, far[0])
    if mean is None:
        return None, f"this workload has no {words_of(name)}: leave out constraints.{name}"
    reason = (
        f"the mean {words_of(far[0])} is {value_words(name, mean)}, "
        f"the limit on {words_of(name)} is {value_words(name, limit)}"
    )
    return mean, reason


def relative_violation(rejection: Rejection) -> float:
    """Return a rejection's excess over its limit, relative to it; 0 if it has no numbers."""
    if rejection.required is None or not rejection.limit:
        return 0.0
    return abs(rejection.required / rejection.limit - 1)


@dataclass(frozen=True)
class LimitViolation:
    """A limit that one strategy violates, with the strategy's value."""

    constraint: str
    reason: str
    required: float | None
    limit: float
    unit: str

    def closer_than(self, other: Rejection) -> bool:
        """Return whether this relative miss is smaller than a rejection's."""
        if self.required is None or other.required is None or not other.limit or not self.limit:
            return False
        own = abs(self.required / self.limit - 1)
        return own < abs(other.required / other.limit - 1)
