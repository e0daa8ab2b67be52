"""Lays what lives off the device over a pass: what is fetched, stored and done on the host."""

from dataclasses import dataclass, replace
from typing import cast

from planner.catalog.engines import routing_evenness
from planner.cost.columns import any_of, maximum, minimum
from planner.cost.communication import transfer_seconds
from planner.cost.dtypes import WIDE
from planner.cost.equation import Line
from planner.cost.experts import experts_read
from planner.cost.kv_cache import cache_bytes
from planner.cost.offload import (
    block_seconds,
    dense_away_share,
    expert_hit_ratio,
    fetched_weight_bytes,
    overlapped_seconds,
)
from planner.cost.roofline import compute_seconds, memory_seconds
from planner.workload.operators import Operation, Part
from planner.workload.setting import Setting

# Visits of experts are uneven: an assumption, no source states it for all models.
EXPERT_SKEW = 0.3
# An attention kernel on the host reaches this share of its memory: FlexGen's own cost model puts
# 12.3 GFLOP/s, hence as many bytes, on a host with about 100 GB/s.
HOST_ATTENTION_EFFICIENCY = 0.12
# Experts on two sockets read 0.3 to 0.4 of their memory's bandwidth (ktransformers tutorial).
HOST_WEIGHT_EFFICIENCY = 0.4
# The same tutorial: 83 prompt tokens a second through 20 billion active expert weights.
HOST_FLOPS_PER_S = 3.3e12


@dataclass(frozen=True)
class PassTotals:
    """The seconds of a pass on the device by what bounds them, before anything is laid over."""

    compute_s: float
    memory_s: float
    communication_s: float
    overhead_s: float

    @property
    def total_s(self) -> float:
        """Return the sum of all parts."""
        return self.compute_s + self.memory_s + self.communication_s + self.overhead_s

    def times(self, factor: float) -> "PassTotals":
        """Return every part multiplied."""
        return PassTotals(
            self.compute_s * factor,
            self.memory_s * factor,
            self.communication_s * factor,
            self.overhead_s * factor,
        )


@dataclass(frozen=True)
class Tiers:
    """Bytes of one pass between the tiers, on one device."""

    weights: float
    kv_loaded: float
    kv_stored: float
    kv_on_host: float
    activations: float


def attends_on_host(setting: Setting) -> bool:
    """Return whether attention over the offloaded cache runs where the cache is.

    A quantised cache is unpacked on the device instead.
    """
    return (setting.strategy.kv_cache_dtype or "bf16") in WIDE


def weights_away(setting: Setting) -> float:
    """Return the share of the weights that is in host memory or on disk."""
    return setting.offload.weights_cpu + setting.offload.weights_disk


def cache_away(setting: Setting) -> float:
    """Return the share of the KV cache that is in host memory or on disk."""
    return setting.offload.kv_cpu + setting.offload.kv_disk


def is_offloaded(setting: Setting) -> bool:
    """Return whether a pass has anything to fetch or store."""
    away = weights_away(setting) + cache_away(setting) + setting.offload.activations_cpu
    return away > 0


def lay_over(run: Operation, own: PassTotals) -> PassTotals:
    """Return the pass with all its micro-batches, its fetching, storing and work on the host.

    Loads, stores and disk work beside the device (FlexGen's zig-zag block schedule): what they
    take beyond its own work is exposed, as communication. Attention on the host holds up the cores
    that feed the link, as FlexGen's own programme has it.
    """
    setting, batches = run.setting, run.work.batches
    if any_of(batches != 1):
        own = own.times(
            run.ledger.term(
                block_seconds,
                _line(run, "Micro-batches of a block", "block"),
                batches=batches,
                batch_s=own.total_s,
            )
            / own.total_s
        )
    if not is_offloaded(setting):
        return own
    tiers = tiers_of(run)
    if setting.engine.computes_on_host:
        return _on_host(run, own, tiers)
    host_s = _host_attention(run, tiers)
    load_s, store_s, disk_s = _links(run, tiers)
    total = run.ledger.term(
        overlapped_seconds,
        _line(run, "Work beside loads and stores", "overlap"),
        work_s=own.total_s + host_s + _on_demand(run, load_s),
        load_s=load_s + host_s,
        store_s=store_s,
        disk_s=disk_s,
    )
    exposed = maximum(0.0, total - own.total_s - host_s)
    return replace(
        own,
        communication_s=own.communication_s + exposed,
        memory_s=own.memory_s + host_s,
    )


def _on_demand(run: Operation, load_s: float) -> float:
    """Return the loads that nothing hides: which experts to fetch, only their router says."""
    return load_s if run.setting.model.is_moe and weights_away(run.setting) else 0.0


def unpack(run: Operation) -> Part:
    """Cost unpacking quantised weights and cache with kernels that are not fused into products."""
    setting, each = run.setting, run.setting.engine.unpack_bytes_per_element
    if not each:
        return Part(0.0)
    values = 0.0
    if setting.weight_dtype not in WIDE:
        values = setting.counts.layer_linear / setting.layout.tensor
    if not attends_on_host(setting):
        scratch = (run.ledger, _line(run, "Values of the cache", "kv_values"))
        held, ranks = run.work.cached_layer_tokens, setting.layout.tensor
        values = values + cache_bytes(setting.model, held, ranks, 1.0, scratch)
    seconds = run.ledger.term(
        memory_seconds,
        setting.line(run.work.group, "Unpacking weights and cache", "memory_bandwidth", "unpack"),
        moved_bytes=values * each,
        memory_bytes_per_s=run.rates.memory_bytes_per_s,
        memory_efficiency=1.0,
    )
    return Part(seconds)


def tiers_of(run: Operation) -> Tiers:
    """Return the bytes that a pass over a whole block moves between the tiers."""
    setting, model, work = run.setting, run.setting.model, run.work
    scratch = (run.ledger, _line(run, "KV cache of this pass", "offload_kv"))
    ranks, element = setting.layout.tensor, setting.kv_element_bytes
    away, batches = cache_away(setting), work.batches
    read = written = 0.0
    if away:
        read = cache_bytes(model, work.cached_layer_tokens, ranks, element, scratch) * batches
        written = cache_bytes(model, work.stored_layer_tokens, ranks, element, scratch) * batches
    on_host = attends_on_host(setting) or work.group == "prefill"
    hidden = work.new_tokens * model.hidden_size * setting.activation_element_bytes * batches
    return Tiers(
        weights=_fetched_weights(run),
        kv_loaded=0.0 if on_host else read * away,
        kv_stored=written * away,
        kv_on_host=read * away if on_host and work.group == "decode" else 0.0,
        activations=hidden * setting.offload.activations_cpu * model.num_hidden_layers,
    )


def _fetched_weights(run: Operation) -> float:
    """Return the bytes of weights away that one pass visits; experts leave the device first."""
    setting, counts = run.setting, run.setting.counts
    away, ranks = weights_away(setting), setting.layout.tensor
    if not away:
        return 0.0
    element = setting.weight_element_bytes
    expert = counts.experts * element / ranks
    dense = (counts.layer_linear - counts.experts) * element / ranks
    beyond = run.ledger.term(
        dense_away_share,
        _line(run, "Dense weights off the device", "dense_away"),
        away_share=away,
        dense_bytes=dense,
        expert_bytes=expert,
    )
    moe = setting.model.is_moe
    visited = expert * _visited_share(run) if moe else 0.0
    hits = 1.0
    if moe:
        cached = maximum(0.0, 1 - away * (dense + expert) / expert)
        hits = run.ledger.term(
            expert_hit_ratio,
            _line(run, "Experts found on the device", "expert_hits"),
            cached_share=cached,
            skew_ratio=EXPERT_SKEW,
        )
    return run.ledger.term(
        fetched_weight_bytes,
        _line(run, "Weights fetched by a pass", "fetched_weights"),
        dense_bytes=dense * _active_share(run),
        dense_share=beyond,
        expert_bytes=visited,
        expert_share=1.0 if moe else 0.0,
        hit_ratio=hits,
    )


def _active_share(run: Operation) -> float:
    """Return the share of the dense weights away that the tokens of a pass need between them.

    Tokens choose for themselves: what none of them needs stays where it is.
    """
    active = run.setting.offload.weights_active_ratio
    if active is None:
        return 1.0
    none = (1.0 - active) ** (run.work.new_tokens * run.work.batches)
    return cast("float", 1.0 - none)


def _visited_share(run: Operation) -> float:
    """Return the share of all experts that the tokens of a pass visit."""
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


def _host_attention(run: Operation, tiers: Tiers) -> float:
    """Cost attention over the cache in host memory, on the host's own cores."""
    if not any_of(tiers.kv_on_host > 0):
        return 0.0
    return run.ledger.term(
        memory_seconds,
        _line(run, "Attention on the host", "host_attention"),
        moved_bytes=tiers.kv_on_host,
        memory_bytes_per_s=run.setting.host_memory_bytes_per_s,
        memory_efficiency=HOST_ATTENTION_EFFICIENCY,
    )


def _links(run: Operation, tiers: Tiers) -> tuple[float, float, float]:
    """Cost the loads to the device, the stores to the host, and the disk."""
    setting, offload = run.setting, run.setting.offload
    disk_weights = offload.weights_disk / weights_away(setting) if weights_away(setting) else 0.0
    disk_cache = offload.kv_disk / cache_away(setting) if cache_away(setting) else 0.0
    kv_moved = tiers.kv_loaded + tiers.kv_stored + tiers.kv_on_host
    from_disk = tiers.weights * disk_weights + kv_moved * disk_cache
    found = []
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
        found.append(term)
    return found[0], found[1], found[2]


def _on_host(run: Operation, own: PassTotals, tiers: Tiers) -> PassTotals:
    """Return a pass whose offloaded layers or experts run on the host's cores.

    The device is spared what the host reads. Long prompts take the faster of the host's
    arithmetic and streaming the weights to the device.
    """
    setting, rates = run.setting, run.rates
    moved = tiers.weights + tiers.kv_loaded + tiers.kv_on_host
    reading = run.ledger.term(
        memory_seconds,
        _line(run, "Layers on the host: weights and cache", "host_read"),
        moved_bytes=moved,
        memory_bytes_per_s=setting.host_memory_bytes_per_s,
        memory_efficiency=HOST_WEIGHT_EFFICIENCY,
    )
    share = min(1.0, weights_away(setting))
    used = setting.counts.active / setting.layout.tensor
    working = run.ledger.term(
        compute_seconds,
        _line(run, "Layers on the host: arithmetic", "host_compute"),
        work_flops=2 * used * share * run.work.new_tokens * run.work.batches,
        peak_flops_per_s=HOST_FLOPS_PER_S,
        compute_efficiency=1.0,
    )
    host_s = maximum(reading, working)
    if run.work.group == "prefill":
        load_s, _, disk_s = _links(run, tiers)
        host_s = minimum(host_s, maximum(load_s, disk_s))
    spared = tiers.weights / (rates.memory_bytes_per_s * rates.weight_efficiency)
    kept = max(0.0, 1 - share) if run.work.group == "prefill" else 1.0
    return PassTotals(
        own.compute_s * kept,
        maximum(0.0, own.memory_s - spared) + host_s,
        own.communication_s,
        own.overhead_s,
    )


def _line(run: Operation, name: str, key: str) -> Line:
    return run.setting.line(run.work.group, name, "communication", key)
