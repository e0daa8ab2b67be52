"""Offloading of weights, KV cache, optimiser states and activations to host and disk."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from planner.catalog.engines import routing_evenness
from planner.cost.communication import StageShare, transfer_seconds
from planner.cost.kv_cache import cache_bytes
from planner.cost.memory import (
    block_seconds,
    double_buffer_bytes,
    expert_hit_ratio,
    fetched_weight_bytes,
    gradient_bucket_bytes,
    kept_on_device_bytes,
    offloaded_dense_share,
    overlapped_seconds,
    shared_link_rate,
    update_seconds,
)
from planner.cost.quantity import Ledger, Line, any_of, maximum, minimum, where
from planner.cost.roofline import attention_work, compute_seconds, experts_read, memory_seconds
from planner.cost.weights import WIDE, element_bytes
from planner.specs.base import OperatorClass
from planner.specs.workload import OffloadSpec
from planner.workload.operators import Operation, OperatorCost
from planner.workload.setting import Setting

# ---------------------------------------------------------------------------
# Offload in a forward pass: buffers, fetches, stores and computation on the host.
# ---------------------------------------------------------------------------


# Expert routing is uneven: an assumption without a source for all models.
EXPERT_SKEW = 0.3
# An attention kernel on the host reaches this share of its memory: FlexGen's cost model has
# 12.3 GFLOP/s, hence 12.3 GB/s, on a host with about 100 GB/s.
HOST_ATTENTION_EFFICIENCY = 0.12
# Experts on two sockets read 0.3 to 0.4 of their memory's bandwidth (ktransformers tutorial).
HOST_WEIGHT_EFFICIENCY = 0.4
# The same tutorial: 83 prompt tokens a second through 20 billion active expert weights.
HOST_FLOPS_PER_S = 3.3e12
# Appending a token copies an eager cache (read and write); attention reads it again.
EAGER_KV_PASSES = 3


@dataclass(frozen=True)
class PassTotals:
    """The seconds of a pass on the device by operator class, without offload."""

    compute_s: float
    memory_s: float
    communication_s: float
    overhead_s: float

    @property
    def total_s(self) -> float:
        """Return the sum of all parts."""
        return self.compute_s + self.memory_s + self.communication_s + self.overhead_s

    def times(self, factor: float) -> "PassTotals":
        """Return every part multiplied by a factor."""
        return PassTotals(
            self.compute_s * factor,
            self.memory_s * factor,
            self.communication_s * factor,
            self.overhead_s * factor,
        )


@dataclass(frozen=True)
class TierTraffic:
    """Bytes that one pass moves between memory tiers, per device."""

    weights: float
    kv_loaded: float
    kv_stored: float
    kv_on_host: float
    activations: float


def attends_on_host(setting: Setting) -> bool:
    """Return whether attention over the offloaded KV cache runs on the host.

    A quantised cache is dequantised on the device instead.
    """
    return (setting.strategy.kv_cache_dtype or "bf16") in WIDE


def overlap_offload(run: Operation, device_pass: PassTotals) -> PassTotals:
    """Return the pass with all micro-batches, offload transfers and work on the host.

    Loads, stores and disk transfers overlap with computation (FlexGen's zig-zag block schedule);
    the excess counts as communication. Attention on the host blocks the cores that feed the link,
    as in FlexGen's code.
    """
    setting, batches = run.setting, run.work.batches
    if any_of(batches != 1):
        device_pass = device_pass.times(
            run.ledger.term(
                block_seconds,
                _line(run, "Micro-batches of a block", "block"),
                batches=batches,
                batch_s=device_pass.total_s,
            )
            / device_pass.total_s
        )
    offload = setting.offload
    if offload.weights_share + offload.kv_share + offload.activations_cpu <= 0:
        return device_pass
    tiers = tier_traffic(run)
    if setting.engine.computes_on_host:
        on_host = _read_on_host if run.work.group == "prefill" else _decode_on_host
        return on_host(run, device_pass, tiers)
    host_s = _host_attention(run, tiers)
    load_s, store_s, disk_s = _links(run, tiers)
    total = run.ledger.term(
        overlapped_seconds,
        _line(run, "Computation during loads and stores", "overlap"),
        work_s=device_pass.total_s + host_s + _on_demand(run, load_s),
        load_s=load_s + host_s,
        store_s=store_s,
        disk_s=disk_s,
    )
    exposed = maximum(0.0, total - device_pass.total_s - host_s)
    return replace(
        device_pass,
        communication_s=device_pass.communication_s + exposed,
        memory_s=device_pass.memory_s + host_s,
    )


def _on_demand(run: Operation, load_s: float) -> float:
    """Return the seconds of loads that cannot overlap: experts are known only after routing."""
    return load_s if run.setting.model.is_moe and run.setting.offload.weights_share else 0.0


def separate_dequantisation(run: Operation) -> OperatorCost:
    """Return the cost of dequantising weights and cache in separate kernels."""
    setting, bytes_each = run.setting, run.setting.engine.unpack_bytes_per_element
    if not bytes_each:
        return OperatorCost(0.0)
    values = 0.0
    if setting.weight_dtype not in WIDE:
        values = setting.counts.layer_linear / setting.layout.tensor
    if not attends_on_host(setting):
        scratch = (run.ledger, _line(run, "Values of the cache", "kv_values"))
        cached, ranks = run.work.cached_layer_tokens, setting.layout.tensor
        values = values + cache_bytes(setting.model, cached, ranks, 1.0, scratch)
    seconds = run.ledger.term(
        memory_seconds,
        setting.line(run.work.group, "Unpacking weights and cache", "memory_bandwidth", "unpack"),
        moved_bytes=values * bytes_each,
        memory_bytes_per_s=run.rates.memory_bytes_per_s,
        memory_efficiency=1.0,
    )
    return OperatorCost(seconds)


def tier_traffic(run: Operation) -> TierTraffic:
    """Return the bytes that a pass over a block of micro-batches moves between the tiers."""
    setting, model, work = run.setting, run.setting.model, run.work
    scratch = (run.ledger, _line(run, "KV cache of this pass", "offload_kv"))
    ranks, element = setting.layout.tensor, setting.kv_element_bytes
    offloaded, batches = setting.offload.kv_share, work.batches
    read = written = 0.0
    if offloaded:
        read = cache_bytes(model, work.cached_layer_tokens, ranks, element, scratch) * batches
        written = cache_bytes(model, work.stored_layer_tokens, ranks, element, scratch) * batches
    on_host = attends_on_host(setting) or work.group == "prefill"
    hidden = work.new_tokens * model.hidden_size * setting.activation_element_bytes * batches
    return TierTraffic(
        weights=_fetched_weights(run),
        kv_loaded=0.0 if on_host else read * offloaded,
        kv_stored=written * offloaded,
        kv_on_host=read * offloaded if on_host and work.group == "decode" else 0.0,
        activations=hidden * setting.offload.activations_cpu * model.num_hidden_layers,
    )


def _fetched_weights(run: Operation) -> float:
    """Return the offloaded weight bytes that one pass fetches; experts are offloaded first.

    An engine that computes on the host leaves the experts of whole layers there, popular or not
    (llama.cpp's --n-cpu-moe); others keep the most visited ones on the device.
    """
    setting, counts = run.setting, run.setting.counts
    offloaded, ranks = setting.offload.weights_share, setting.layout.tensor
    if not offloaded:
        return 0.0
    element = setting.weight_element_bytes
    expert = counts.experts * element / ranks
    dense = (counts.layer_linear - counts.experts) * element / ranks
    dense_share = run.ledger.term(
        offloaded_dense_share,
        _line(run, "Offloaded dense weights", "dense_away"),
        away_share=offloaded,
        dense_bytes=dense,
        expert_bytes=expert,
    )
    moe = setting.model.is_moe
    visited = expert * _routed_expert_ratio(run) if moe else 0.0
    hits = 1.0
    if moe:
        cached = maximum(0.0, 1 - offloaded * (dense + expert) / expert)
        hits = run.ledger.term(
            expert_hit_ratio,
            _line(run, "Experts found on the device", "expert_hits"),
            cached_share=cached,
            skew_ratio=0.0 if setting.engine.computes_on_host else EXPERT_SKEW,
        )
    return run.ledger.term(
        fetched_weight_bytes,
        _line(run, "Weights fetched by a pass", "fetched_weights"),
        dense_bytes=dense * _active_offloaded_ratio(run),
        dense_share=dense_share,
        expert_bytes=visited,
        expert_share=1.0 if moe else 0.0,
        hit_ratio=hits,
    )


def _active_offloaded_ratio(run: Operation) -> float:
    """Return the share of the offloaded dense weights that any token of a pass needs.

    Each token activates weights independently; weights that no token needs are not fetched.
    """
    active = run.setting.offload.weights_active_ratio
    if active is None:
        return 1.0
    none = (1.0 - active) ** (run.work.new_tokens * run.work.batches)
    return cast("float", 1.0 - none)


def _routed_expert_ratio(run: Operation) -> float:
    """Return the share of all experts that the tokens of a pass are routed to."""
    model = run.setting.model
    tokens = run.work.routed_tokens * run.work.batches
    read = experts_read(
        num_experts=model.num_experts,
        experts_per_token=model.num_experts_per_tok,
        num_tokens=tokens,
        expert_ranks=1,
        evenness=routing_evenness(),
    )
    return minimum(1.0, cast("float", read) / model.num_experts)


def _host_attention(run: Operation, tiers: TierTraffic) -> float:
    """Return the seconds of attention over the KV cache in host memory, on the host's cores."""
    if not any_of(tiers.kv_on_host > 0):
        return 0.0
    host_s = run.ledger.term(
        memory_seconds,
        _line(run, "Attention on the host", "host_attention"),
        moved_bytes=tiers.kv_on_host,
        memory_bytes_per_s=run.setting.host_memory_bytes_per_s,
        memory_efficiency=HOST_ATTENTION_EFFICIENCY,
    )
    return maximum(host_s, _device_attention_seconds(run, tiers))


def _device_attention_seconds(run: Operation, tiers: TierTraffic) -> float:
    """Return the seconds of the device for the attention that the host takes over.

    The host is not costed as faster than the device.
    """
    if not any_of(tiers.kv_on_host > 0):
        return 0.0
    name = "Attention of the host's share at the device's pace"
    scratch = (run.ledger, _line(run, f"{name}: arithmetic", "host_pace_flops"))
    setting, pairs = run.setting, run.work.host_token_pairs
    flops = attention_work(
        setting.model, pairs, setting.layout.tensor, scratch, absorbed=run.work.absorbed
    )
    passes = EAGER_KV_PASSES if setting.engine.ops_per_layer else 1
    part = run.roofline(
        (name, "attention", "host_pace"),
        flops * run.work.batches,
        passes * tiers.kv_on_host,
    )
    return part.seconds


def _links(run: Operation, tiers: TierTraffic) -> tuple[float, float, float]:
    """Return the seconds of loads to the device, stores to the host and disk transfers."""
    setting, offload = run.setting, run.setting.offload
    weights, cache = offload.weights_share, offload.kv_share
    disk_weights = offload.weights_disk / weights if weights else 0.0
    disk_cache = offload.kv_disk / cache if cache else 0.0
    kv_moved = tiers.kv_loaded + tiers.kv_stored + tiers.kv_on_host
    from_disk = tiers.weights * disk_weights + kv_moved * disk_cache
    seconds = []
    for name, key, moved, rate in (
        (
            "Loads from host memory",
            "offload",
            tiers.weights + tiers.kv_loaded + tiers.activations,
            setting.host_link_bytes_per_s,
        ),
        (
            "Stores to host memory",
            "store",
            tiers.kv_stored + tiers.activations,
            setting.host_link_bytes_per_s,
        ),
        ("Reads and writes of the disk", "disk", from_disk, setting.disk_bytes_per_s),
    ):
        term = 0.0
        if any_of(moved > 0):
            term = run.ledger.term(
                transfer_seconds,
                _line(run, name, key),
                payload_bytes=moved,
                link_bytes_per_s=rate,
            )
        seconds.append(term)
    return seconds[0], seconds[1], seconds[2]


def _read_on_host(run: Operation, device_pass: PassTotals, tiers: TierTraffic) -> PassTotals:
    """Return a prefill pass with layers or experts in host memory or on disk.

    Either a layer's weights are copied to the device in every step and used when they are there
    (copies and products do not overlap: ggml-org/llama.cpp issue 25859, pull request 7315), or the
    host's cores compute them. The faster way is taken, and neither is faster than with all weights
    on the device.
    """
    read_s, compute_s = _host_seconds(run, tiers)
    load_s, _, disk_s = _links(run, tiers)
    streamed_s = device_pass.total_s + run.work.steps * maximum(load_s, disk_s)
    device_share = 1 - _host_work_share(run)
    computed_s = device_share * device_pass.total_s + maximum(maximum(read_s, compute_s), disk_s)
    extra_s = maximum(0.0, minimum(streamed_s, computed_s) - device_pass.total_s)
    streams = streamed_s <= computed_s
    return replace(
        device_pass,
        memory_s=device_pass.memory_s + where(streams, 0.0, extra_s),
        communication_s=device_pass.communication_s + where(streams, extra_s, 0.0),
    )


def _decode_on_host(run: Operation, device_pass: PassTotals, tiers: TierTraffic) -> PassTotals:
    """Return a decode pass whose offloaded layers or experts run on the host's cores.

    The host reads their weights and cache instead of the device, and is not faster than it.
    """
    rates = run.rates
    read_s, compute_s = _host_seconds(run, tiers)
    _, _, disk_s = _links(run, tiers)
    weights_s = tiers.weights / (rates.memory_bytes_per_s * rates.weight_efficiency)
    cache_s = _device_attention_seconds(run, tiers)
    host_s = maximum(maximum(read_s, compute_s), maximum(disk_s, weights_s + cache_s))
    return replace(device_pass, memory_s=maximum(0.0, device_pass.memory_s - weights_s) + host_s)


def _host_seconds(run: Operation, tiers: TierTraffic) -> tuple[float, float]:
    """Return the seconds of reading and computing offloaded layers or experts on the host."""
    setting, work = run.setting, run.work
    read_s = run.ledger.term(
        memory_seconds,
        _line(run, "Layers on the host: weights and cache", "host_read"),
        moved_bytes=tiers.weights + tiers.kv_loaded + tiers.kv_on_host,
        memory_bytes_per_s=setting.host_memory_bytes_per_s,
        memory_efficiency=HOST_WEIGHT_EFFICIENCY,
    )
    used = setting.counts.active / setting.layout.tensor
    compute_s = run.ledger.term(
        compute_seconds,
        _line(run, "Layers on the host: arithmetic", "host_compute"),
        work_flops=2 * used * _host_work_share(run) * work.new_tokens * work.batches,
        peak_flops_per_s=HOST_FLOPS_PER_S,
        compute_efficiency=1.0,
    )
    return read_s, compute_s


def _host_work_share(run: Operation) -> float:
    """Return the share of a token's products whose weights are offloaded."""
    return minimum(1.0, run.setting.offload.weights_share)


def _line(run: Operation, name: str, key: str) -> Line:
    return run.setting.line(run.work.group, name, "communication", key)


# Host and disk memory of an inference strategy, and the buffers for streaming.


GROUP = "memory"
# The offload fields for weights, cache and activations of each tier.
HOST = ("weights_cpu", "kv_cpu", "activations_cpu")
DISK = ("weights_disk", "kv_disk", "")
Bytes = Callable[[StageShare], float]


def offloaded_bytes(
    setting: Setting,
    shares: tuple[str, ...],
    weights: Bytes,
    cache: Bytes,
    stages: Sequence[StageShare],
    tokens: float,
) -> float:
    """Return the bytes in one tier: weights once, caches and activations per replica.

    ``weights`` and ``cache`` return one device's bytes of a pipeline stage.
    """
    layout = setting.layout
    weight_share, cache_share, activation_share = (
        getattr(setting.offload, name, 0.0) for name in shares
    )
    if not weight_share and not cache_share and not activation_share:
        return 0.0
    copies = setting.engine.host_copy_ratio if shares == HOST else 1.0
    weight_bytes = copies * sum(weight_share * weights(stage) for stage in stages)
    cache_bytes = sum(cache_share * cache(stage) for stage in stages) * layout.data
    activation_bytes = activation_share * residual_bytes(setting, tokens) * layout.data
    return layout.tensor * (weight_bytes + cache_bytes) + activation_bytes


def residual_bytes(setting: Setting, tokens: float) -> float:
    """Return the bytes of the residual streams of tokens between two layers."""
    return tokens * setting.model.hidden_size * setting.activation_element_bytes


def waiting_bytes(setting: Setting, tokens: float) -> float:
    """Return the bytes of waiting micro-batches' residual streams on the device."""
    return residual_bytes(setting, tokens) * (1 - setting.offload.activations_cpu)


def double_buffer(setting: Setting, ledger: Ledger, weights: float, stage: StageShare) -> float:
    """Return the bytes of a double buffer: the current layer and the one being loaded."""
    offloaded = setting.offload.weights_share
    if not offloaded or setting.engine.computes_on_host:
        return 0.0
    return ledger.term(
        double_buffer_bytes,
        setting.line(GROUP, "Two layers in transfer", key="buffers"),
        weight_bytes=weights,
        num_layers=stage.layers,
        away_share=offloaded,
    )


# ---------------------------------------------------------------------------
# Offload in training: the bytes in each memory tier and the time of their transfers.
#
# Weights are fetched for the forward and the backward pass, gradients and activations are stored
# as they are produced, and offloaded optimiser states are updated on the host. Transfers overlap
# with computation layer by layer; only the excess is exposed.
#
# Sources: Ren et al. 2021 (ZeRO-Offload), arXiv:2101.06840; Rajbhandari et al. 2021
# (ZeRO-Infinity), arXiv:2104.07857.
# ---------------------------------------------------------------------------


TRAINING_GROUP = "train_step"
# DeepSpeed's default bucket has 500 million elements.
BUCKET_ELEMENTS = 5e8
# DeepSpeedCPUAdam moves 28 bytes a parameter: 1, 4 and 10 billion take 0.22, 1.03 and 2.57 s on
# a DGX-2 host, hence 109 to 127 GB/s of the 200 GB/s assumed for a server.
# Source: arXiv:2101.06840, table 4.
HOST_UPDATE_EFFICIENCY = 0.55
# A step reads and writes each state once.
READS_AND_WRITES = 2
NOWHERE = "none"
FULL_SHARDING = 3


@dataclass(frozen=True)
class StageBytes:
    """The bytes of one device of a stage by tensor class, without offload."""

    weights: float
    gradients: float
    optimizer_states: float
    activations: float
    updated: float  # parameters that one rank updates


@dataclass(frozen=True)
class OffloadTraffic:
    """The bytes that one rank moves per micro-batch if a class is fully offloaded."""

    weights: float
    gradients: float
    activations: float


def is_offloading(offload: OffloadSpec) -> bool:
    """Return whether any weights, activations or optimiser states are offloaded."""
    shares = offload.weights_share + offload.activations_cpu
    return shares > 0 or offload.optimizer != NOWHERE


def offloads_gradients(setting: Setting) -> bool:
    """Return whether gradients are offloaded together with the optimiser states."""
    return setting.offload.optimizer != NOWHERE and not setting.engine.keeps_gradients


def device_gradient_bytes(setting: Setting, ledger: Ledger, gradients: float) -> float:
    """Return the bytes of gradients on the device; one bucket if they are offloaded."""
    if not offloads_gradients(setting):
        return gradients
    return ledger.term(
        gradient_bucket_bytes,
        setting.line("memory", "Gradients in transfer to the host", key="gradient_bucket"),
        gradient_bytes=gradients,
        bucket_bytes=BUCKET_ELEMENTS * element_bytes(setting.strategy.gradient_dtype or "bf16"),
    )


def device_activation_bytes(
    setting: Setting, ledger: Ledger, saved_bytes: float, layers: float
) -> float:
    """Return the bytes of saved activations on the device."""
    share = setting.offload.activations_cpu
    if not share:
        return saved_bytes
    return ledger.term(
        kept_on_device_bytes,
        setting.line("memory", "Activations that stay on the device", key="kept_on_device"),
        kept_bytes=saved_bytes,
        away_share=share,
        num_layers=layers,
    )


def tier_bytes(setting: Setting, stage: StageBytes) -> tuple[float, float]:
    """Return the bytes in host memory and on disk for one device of a stage."""
    offload = setting.offload
    gradients = stage.gradients if offloads_gradients(setting) else 0.0
    host = stage.weights * offload.weights_cpu + stage.activations * offload.activations_cpu
    disk = stage.weights * offload.weights_disk
    if offload.optimizer == "cpu":
        host = host + stage.optimizer_states + _host_gradients(setting, gradients, stage.updated)
    if offload.optimizer == "nvme":
        disk = disk + stage.optimizer_states + gradients
    return host, disk


def _host_gradients(setting: Setting, gradients: float, updated: float) -> float:
    """Return the bytes of gradients, their copies and buffers beside states in host memory."""
    each = setting.engine.host_gradient_bytes
    if not each:
        return gradients
    return updated * where(setting.layout.zero_stage >= FULL_SHARDING, each["3"], each["2"])


class TrainingOffload:
    """The offload transfer times of a training step, recorded in the ledger."""

    def __init__(self, setting: Setting, ledger: Ledger) -> None:
        self.setting, self.ledger, self.offload = setting, ledger, setting.offload
        layout, cluster = setting.layout, setting.cluster
        self.sharers = minimum(cluster.devices_per_node, layout.devices)

    def _rate(self) -> float:
        """Return the bandwidth of a rank's host link while all ranks of its node use theirs."""
        return self.ledger.term(
            shared_link_rate,
            self.setting.line(TRAINING_GROUP, "Link of one rank to its host", key="link"),
            link_bytes_per_s=self.setting.host_link_bytes_per_s,
            tier_bytes_per_s=self.setting.host_memory_bytes_per_s,
            sharers=self.sharers,
        )

    def exposed_seconds(self, own_s: float, forward_share: float, whole: OffloadTraffic) -> float:
        """Return the seconds per micro-batch of transfers that computation does not hide.

        A micro-batch takes ``own_s`` without offloading, of which ``forward_share`` is the forward
        pass. ``whole`` are the bytes that it would move if everything were offloaded.
        """
        if not is_offloading(self.offload):
            return 0.0
        rate, share = self._rate(), self.offload.activations_cpu
        weights = whole.weights * self.offload.weights_share
        gradients = whole.gradients if offloads_gradients(self.setting) else 0.0
        disk_s = self._disk("Weights from disk", whole.weights * self.offload.weights_disk)
        activations = whole.activations * share
        forward = self._phase(
            "Forward", own_s * forward_share, (weights / rate, activations / rate, disk_s)
        )
        backward = self._phase(
            "Backward",
            own_s * (1 - forward_share),
            ((weights + activations) / rate, gradients / rate, disk_s),
        )
        return maximum(0.0, forward + backward - own_s)

    def _phase(self, name: str, work_s: float, channels: tuple[float, float, float]) -> float:
        load_s, store_s, disk_s = channels
        return self.ledger.term(
            overlapped_seconds,
            self._line(f"{name} during loads and stores", f"overlap_{name.lower()}"),
            work_s=work_s,
            load_s=load_s,
            store_s=store_s,
            disk_s=disk_s,
        )

    def _disk(self, name: str, moved_bytes: float) -> float:
        if not any_of(moved_bytes > 0):
            return 0.0
        return self.ledger.term(
            transfer_seconds,
            self._line(name, "disk"),
            payload_bytes=moved_bytes * self.sharers,
            link_bytes_per_s=self.setting.disk_bytes_per_s,
        )

    def update(self, parameters: float, states_each: float) -> float:
        """Return the seconds of an optimiser update on the host, overlapped with weight loads.

        ``parameters`` are those of one rank; ``states_each`` is the state bytes per parameter.
        """
        setting, offload = self.setting, self.offload
        gradient = element_bytes(setting.strategy.gradient_dtype or "bf16")
        weight = setting.plain_element_bytes
        update_s = self.ledger.term(
            update_seconds,
            self._line("Update in host memory", "update", "memory_bandwidth"),
            parameters=parameters,
            bytes_per_element=READS_AND_WRITES * states_each + gradient + weight,
            sharers=self.sharers,
            tier_bytes_per_s=setting.host_memory_bytes_per_s,
            efficiency=HOST_UPDATE_EFFICIENCY,
        )
        loaded = parameters * weight * (1 - offload.weights_share)
        stored = 0.0 if offloads_gradients(setting) else parameters * gradient
        on_disk = parameters * weight * offload.weights_disk
        if offload.optimizer == "nvme":
            on_disk = on_disk + parameters * READS_AND_WRITES * (states_each + gradient)
        rate = self._rate()
        return self.ledger.term(
            overlapped_seconds,
            self._line("Update during its loads and stores", "overlap_update"),
            work_s=update_s,
            load_s=loaded / rate,
            store_s=stored / rate,
            disk_s=self._disk("States from and to disk", on_disk),
        )

    def _line(self, name: str, key: str, kind: OperatorClass = "communication") -> Line:
        return self.setting.line(TRAINING_GROUP, name, kind, key)
