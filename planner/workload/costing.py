"""The costs of every workload, and the estimate of a request: resolve, cost and explain it."""

from dataclasses import replace
from functools import cached_property
from typing import cast

from planner.catalog.devices import unified_memory
from planner.catalog.engines import calibration_of, release_number
from planner.catalog.quality import (
    combined_quality,
    family_of_model,
    kv_cache_quality,
    native_quality,
    pruning_quality,
    scheme_quality,
    weight_quality,
)
from planner.cost.quantity import Flag, Ledger, NullLedger
from planner.specs.base import Dtype, NotCoveredError
from planner.specs.estimate import Estimate, EstimateRequest, MemoryAnswer, Performance, Quality
from planner.specs.units import GIB
from planner.specs.workload import CompressWorkload, GenerateWorkload, ServeWorkload, TrainWorkload
from planner.workload.compress import NARROW_BITS, compress, target_dtype
from planner.workload.device_groups import devices_of, mean_device
from planner.workload.disaggregate import (
    generate_heterogeneous,
    serve_disaggregated,
    serve_heterogeneous,
)
from planner.workload.generate import fits_one_request, max_concurrency
from planner.workload.inference_memory import default_requests
from planner.workload.long_run import failures_of
from planner.workload.on_policy import on_policy_fits, train_on_policy
from planner.workload.outcome import Confidence, Outcome, confidence_of, expense, intervals_of
from planner.workload.queued_batch import answer_batch
from planner.workload.resolve import resolve
from planner.workload.serve import fills_every_slot, serve
from planner.workload.setting import Setting, width_of
from planner.workload.train import held_memory, train_run
from planner.workload.under_load import under_heterogeneous_load, under_load

WIDTH_NAMES = {"wide": "16-bit", "8bit": "8-bit", "4bit": "4-bit"}
KIND_NAMES = {
    "gpu": "GPU",
    "cpu": "CPU",
    "uma": "chip with unified memory",
    "accelerator": "accelerator",
}
BILLION = 1e9
UNIFIED_MARGIN = 0.05  # less is paged out: osaurus-ai/osaurus PR 1958, 34.2 of 37.4 GiB


def estimate_request(
    request: EstimateRequest, *, explain: bool = True, simulate: bool | None = None
) -> Estimate:
    """Return the estimate of a request; without ``explain``, it has no terms.

    Percentiles are computed if ``simulate``, which defaults to ``explain``.

    Raises:
        PlannerError: a name is unknown, or the strategy is impossible or not covered.
    """
    return Costing(request).estimate(explain=explain, simulate=simulate)


class Costing:
    """The costs of one request, computed on demand and cached.

    Raises:
        PlannerError: a name is unknown, or the strategy is impossible or not covered.
    """

    def __init__(self, request: EstimateRequest) -> None:
        self.id, self.setting = request.id, resolve(request)

    @cached_property
    def _plain(self) -> tuple[Outcome, Ledger]:
        ledger = Ledger()
        return cost_workload(self.setting, ledger), ledger

    @cached_property
    def _simulated(self) -> tuple[Outcome, Ledger]:
        outcome, plain = self._plain
        ledger = plain.copy()
        return _with_percentiles(self.setting, outcome, ledger), ledger

    def estimate(self, *, explain: bool = True, simulate: bool | None = None) -> Estimate:
        """Return the estimate, with terms if ``explain`` and percentiles if ``simulate``."""
        setting = self.setting
        with_percentiles = explain if simulate is None else simulate
        outcome, recorded = self._simulated if with_percentiles else self._plain
        ledger = recorded.copy()
        tier_warnings = _memory_tier_warnings(setting, outcome)
        if tier_warnings:
            outcome = replace(outcome, fits=False)
        costs = expense(paid_setting(setting), outcome, ledger, rented_devices(setting))
        memory = _memory_result(setting, outcome)
        confidence = _lowest_confidence(setting, outcome)
        queued = isinstance(setting.workload, ServeWorkload)
        intervals = intervals_of(confidence, outcome.performance, memory, queued=queued)
        failures = failures_of(setting, outcome, ledger, intervals)
        return Estimate(
            id=self.id,
            fits=outcome.fits,
            memory=memory,
            performance=_trained_despite(outcome.performance, failures.trained_ratio),
            reliability=failures.reliability,
            interval={**intervals, **costs.intervals},
            error_class=confidence.error_class,
            bound_by=outcome.bound_by,
            time_breakdown_seconds={
                phase: {name: value for name, value in seconds.items() if value}
                for phase, seconds in outcome.phases.items()
            },
            quality=quality_of(setting),
            strategy=setting.strategy,
            engine=setting.engine.key,
            warnings=(
                *setting.warnings,
                *outcome.warnings,
                *failures.warnings,
                *tier_warnings,
                *_unchecked_host_warnings(setting, outcome),
                *_unified_memory_warnings(setting, outcome),
                *_reservation_warnings(setting, outcome),
                *_graph_estimate_warnings(setting),
                *_lone_source_warnings(setting),
            ),
            calibration=calibration_of(setting.host_calibration),
            terms=ledger.terms() if explain else (),
            **costs.figures,
        )


def _trained_despite(performance: Performance, ratio: float) -> Performance:
    """Return the figures of a run of a stated time that trains a part of its tokens."""
    if ratio == 1.0 or performance.trained_tokens is None:
        return performance
    return performance.model_copy(update={"trained_tokens": performance.trained_tokens * ratio})


def cost_workload(setting: Setting, ledger: Ledger) -> Outcome:
    """Return the costs of a setting's workload."""
    workload = setting.workload
    unlike = bool(setting.cluster.other_nodes)
    match workload:
        case ServeWorkload() if unlike:
            return serve_heterogeneous(setting, workload, ledger)
        case GenerateWorkload() if unlike:
            return generate_heterogeneous(setting, workload, ledger)
        case CompressWorkload() if unlike:
            raise NotCoveredError(
                "compress on unlike nodes is not costed: it works on one layer at a time, so ask "
                "for the nodes of one kind",
                "cluster.other_nodes",
            )
        case ServeWorkload():
            pooled = setting.strategy.disaggregated is not None
            return (serve_disaggregated if pooled else serve)(setting, workload, ledger)
        case GenerateWorkload():
            return answer_batch(setting, workload, ledger)
        case TrainWorkload():
            trained = train_on_policy if workload.generates else train_run
            return trained(setting, workload, ledger)
        case CompressWorkload():
            return compress(setting, workload, ledger)


def _memory_result(setting: Setting, outcome: Outcome) -> MemoryAnswer:
    """Return the memory per device, and for a pipeline the layers of each stage."""
    memory = outcome.memory.to_result()
    layers = outcome.stage_layers or tuple(int(float(share.layers)) for share in setting.shares)
    if len(layers) <= 1 or len(layers) != len(memory.per_stage_peak_bytes):
        return memory
    stages = {"per_stage_layers": layers, "per_stage_devices": outcome.stage_devices or None}
    return memory.model_copy(update=stages)


def fits_of(setting: Setting) -> Flag:
    """Return whether a setting fits by memory; True where only ``cost_workload`` can decide."""
    workload = setting.workload
    if isinstance(workload, TrainWorkload) and workload.generates:
        return on_policy_fits(setting, workload)
    if isinstance(workload, TrainWorkload) and workload.length_schedule is None:
        return held_memory(setting, workload, NullLedger()).fits
    is_uniform = not setting.cluster.other_nodes and setting.strategy.disaggregated is None
    if isinstance(workload, ServeWorkload) and is_uniform:
        return fits_one_request(setting, workload)
    return True


def _with_percentiles(setting: Setting, outcome: Outcome, ledger: Ledger) -> Outcome:
    """Return a serving outcome with percentiles from a simulation."""
    workload = setting.workload
    if not isinstance(workload, ServeWorkload) or setting.strategy.disaggregated:
        return outcome
    simulate = under_heterogeneous_load if setting.cluster.other_nodes else under_load
    performance, warnings = simulate(setting, workload, outcome, ledger)
    return replace(outcome, performance=performance, warnings=(*outcome.warnings, *warnings))


def _memory_tier_warnings(setting: Setting, outcome: Outcome) -> tuple[str, ...]:
    """Return a warning for each memory tier that is too small."""
    cluster, memory = setting.cluster, outcome.memory
    tiers = (
        ("what is offloaded", "host memory", memory.host_bytes, cluster.host_memory_bytes),
        ("the job", "disk", memory.disk_bytes, cluster.disk_capacity_bytes),
    )
    warnings = []
    for content, name, needed, per_node in tiers:
        available = (per_node or 0) * cluster.nodes
        if available and needed > available:
            need, have = needed / GIB, available / GIB
            warnings.append(f"{content} needs {need:.1f} GiB of {name}, {have:.1f} GiB are there")
    return tuple(warnings)


def _unchecked_host_warnings(setting: Setting, outcome: Outcome) -> tuple[str, ...]:
    """Return how much a server keeps in the memory of a host that is not described."""
    held, described = outcome.memory.host_bytes, setting.cluster.host_memory_bytes
    serves = isinstance(setting.workload, ServeWorkload | GenerateWorkload)
    if not held or described or not serves:
        return ()
    where = f"{held / GIB:.1f} GiB lie in host memory, which is not described"
    return (f"{where}: state host_memory_bytes to have it checked",)


def _unified_memory_warnings(setting: Setting, outcome: Outcome) -> tuple[str, ...]:
    """Return what a peak close to the limit of a unified memory, or to its default, risks."""
    device, memory = setting.device, outcome.memory
    limits = None if setting.cluster.other_nodes else unified_memory(device)
    if limits is None or not outcome.fits or device.usable_memory_ratio is not None:
        return ()
    peak, name = memory.peak_bytes, device.name or device.id
    warnings = []
    if peak > limits.assured_bytes:
        warnings.append(
            f"{name} gives the GPU {limits.assured_bytes / GIB:.1f} GiB {limits.otherwise}: "
            f"{peak / GIB:.1f} GiB need {limits.advice}"
        )
    room, workload = outcome.performance.max_concurrency, setting.workload
    is_filled = isinstance(workload, ServeWorkload) and fills_every_slot(setting, workload)
    offered = getattr(workload, "concurrency", None) or getattr(workload, "batch_size", None) or 0
    takes_what_is_free = room is not None and room > 1 and (is_filled or offered > room)
    if not takes_what_is_free and memory.filled_ratio > 1 - UNIFIED_MARGIN:
        warnings.append(
            f"{name} is filled to {memory.filled_ratio:.0%} of the {memory.usable_bytes / GIB:.1f}"
            " GiB that the GPU may use: other programs share this memory, which may be paged out"
        )
    return tuple(warnings)


def _reservation_warnings(setting: Setting, outcome: Outcome) -> tuple[str, ...]:
    """Return a warning if the engine starts only with the stated number of requests."""
    workload, engine = setting.workload, setting.engine
    stated = workload.concurrency if isinstance(workload, ServeWorkload) else None
    uniform = not setting.cluster.other_nodes and setting.strategy.disaggregated is None
    if stated is None or not (engine.reserves_largest_step and uniform and outcome.fits):
        return ()
    default = default_requests(setting)
    logits = default * setting.model.vocab_size * (engine.bytes_per_logit or 0.0)
    if stated >= default or outcome.memory.peak_bytes + logits <= outcome.memory.usable_bytes:
        return ()
    unstated = workload.model_copy(update={"concurrency": None})
    if max_concurrency(replace(setting, workload=unstated), cast("ServeWorkload", unstated)) >= 1:
        return ()
    warning = (
        f"{engine.title} starts only with its requests limited to the {stated} stated: for its "
        f"default of {default} at once it sets aside more than is left for the cache"
    )
    return (warning,)


def _graph_estimate_warnings(setting: Setting) -> tuple[str, ...]:
    """Return a warning where the engine's estimate of its CUDA graphs has taken most of a device.

    Issues 45178 and 53013 of vLLM: 62 GiB of a B200, 119 of a GB300, for less than 2 captured.
    """
    engine, since = setting.engine, setting.engine.estimates_graphs_since
    release = release_number(engine.release)
    spread = setting.model.is_moe and setting.layout.attention_data > 1
    serves = isinstance(setting.workload, ServeWorkload) and setting.device.kind == "gpu"
    if not (since and spread and serves) or (release and release < release_number(since)):
        return ()
    warning = (
        f"{engine.title} from {since} on sets aside an estimate of its CUDA graphs, which took 62 "
        "GiB of a B200 and 119 GiB of a GB300 from mixtures with data parallel attention: if its "
        "log says as much, set VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0"
    )
    return (warning,)


def _lone_source_warnings(setting: Setting) -> tuple[str, ...]:
    """Return a warning where one published source on one device measured a pass of these weights.

    Its interval is then as wide as single streams are off in sources that no fit has seen.
    """
    answers = isinstance(setting.workload, GenerateWorkload | ServeWorkload)
    if not (answers and setting.lone_streams):
        return ()
    passes, width = " and ".join(setting.lone_streams), WIDTH_NAMES[width_of(setting)]
    warning = (
        f"the speed of {passes} with {width} weights in {setting.engine.title} is fitted to one "
        f"published source on one {KIND_NAMES[setting.device.kind]}: the interval is wider"
    )
    return (warning,)


def _lowest_confidence(setting: Setting, outcome: Outcome) -> Confidence:
    """Return the confidence of an estimate; of several devices, the lowest."""
    if not setting.cluster.other_nodes:
        return confidence_of(setting, outcome.phases)
    kinds = {device.id: device for device in devices_of(setting)}.values()
    confidences = [
        confidence_of(replace(setting, device=device), outcome.phases) for device in kinds
    ]
    return max(confidences, key=lambda confidence: confidence.time_spread)


def paid_setting(setting: Setting) -> Setting:
    """Return the setting with a device of mean price and power."""
    if not setting.cluster.other_nodes:
        return setting
    return replace(setting, device=mean_device(setting))


def rented_devices(setting: Setting) -> int:
    """Return the number of paid devices: all of an instance, or those in use."""
    in_use = setting.devices_in_use
    return setting.cluster.num_devices if setting.cluster.instance else cast("int", in_use)


def quality_of(setting: Setting) -> Quality | None:
    """Return the quality of the running or compressed model; None for training."""
    workload, strategy = setting.workload, setting.strategy
    if isinstance(workload, TrainWorkload):
        return None
    model = setting.model
    family = family_of_model(model.id, model.model_type, model.vocab_size)
    billions = setting.counts.total / BILLION
    if isinstance(workload, CompressWorkload):
        dtype = _stored_as(setting, target_dtype(workload))
        group = workload.group_size or strategy.group_size
        if workload.bits in NARROW_BITS:
            name = "rtn" if workload.method == "int4_weight_only" else workload.method
            return scheme_quality(f"{name}-{workload.bits}g", family, billions)
        return weight_quality(
            dtype, "bf16", workload.method, family=family, billions=billions, group_size=group
        )
    as_published = setting.weight_dtype == model.weight_dtype
    published = model.quantization if as_published else None
    if is_native(setting):
        weights = native_quality(setting.weight_dtype)
    else:
        weights = weight_quality(
            _stored_as(setting, setting.weight_dtype),
            setting.activation_dtype,
            strategy.quantization or published,
            family=family,
            billions=billions,
            group_size=strategy.group_size,
        )
    zeros = pruning_quality(
        strategy.sparsity,
        method="sparsegpt",
        pattern="unstructured",
        family=family,
        billions=billions,
    )
    cache = kv_cache_quality(strategy.kv_cache_dtype, family=family, billions=billions)
    return combined_quality(weights, zeros, cache)


def is_native(setting: Setting) -> bool:
    """Return whether the weights are those of the release, in its own narrow format."""
    native, method = setting.model.native_dtype, setting.strategy.quantization
    if native is None:
        return False
    if method is not None and method == setting.engine.file_formats.get(native):
        return True
    same_method = method in {None, native, setting.model.quantization}
    return setting.weight_dtype == native and same_method


def _stored_as(setting: Setting, dtype: Dtype) -> Dtype:
    """Return the stored format of a dtype: Slipway's runner stores int4 as nf4."""
    return "nf4" if dtype == "int4" and setting.engine.role == "runner" else dtype
