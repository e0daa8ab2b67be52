"""Compute, memory and link rates of a device for a pair of formats."""

from dataclasses import dataclass

from planner.catalog.engines import Engine
from planner.cost.dtypes import SIXTEEN_BIT, WIDE, unquantised_dtype
from planner.specs.base import Dtype
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.workload.peaks import peak_of

DEFAULT_INTER_NODE_BYTES_PER_S = 50e9  # one 400 Gbit/s port per device
DEFAULT_INTRA_NODE_BYTES_PER_S = 16e9  # PCIe 3.0 x16, where the catalog names no link


@dataclass(frozen=True)
class Rates:
    """Peak rates, efficiencies and latencies of the device in one setting."""

    peak_flops_per_s: float
    compute_efficiency: float
    # The same for 16 bits, in which attention and the output head run.
    wide_peak_flops_per_s: float
    wide_efficiency: float
    memory_bytes_per_s: float
    weight_efficiency: float
    stream_efficiency: float
    kv_efficiency: float
    link_bytes_per_s: float
    inter_node_bytes_per_s: float
    latency_s: float
    hop_latency_s: float
    op_overhead_s: float


def emulates_narrow_products(engine: Engine, device: DeviceSpec, computed: Dtype) -> bool:
    """Return whether Slipway's trainer emulates 8-bit float products in fp32."""
    has_units = "fp8" in device.peak_flops_per_second
    return computed == "fp8" and engine.counted_by_operator and not has_units


def rates_for(
    cluster: ClusterSpec, device: DeviceSpec, engine: Engine, dtypes: tuple[Dtype, Dtype]
) -> Rates:
    """Return the rates of operators that compute in the first dtype and store the second."""
    computed, stored = dtypes
    if emulates_narrow_products(engine, device, computed):
        computed = "fp32"
    peak, used = peak_of(device, computed)
    if engine.sums_in_16_bits and used in SIXTEEN_BIT and device.halves_wide_sums:
        peak *= 2
    wide_peak, wide = (peak, used) if used in WIDE else peak_of(device, "bf16")
    efficiency, wide_efficiency = (
        device.achieved_flops_per_second[dtype] / rate
        if dtype in device.achieved_flops_per_second
        else engine.matmul_efficiency
        for dtype, rate in ((used, peak), (wide, wide_peak))
    )
    weight_efficiency, kv_efficiency = engine.weight_read_efficiency, engine.kv_read_efficiency
    if device.provenance == "measured":
        efficiency = wide_efficiency = engine.measured_matmul_efficiency
        weight_efficiency = kv_efficiency = 1.0
    stream_efficiency = weight_efficiency
    if device.kind == "cpu":
        weight_efficiency *= engine.matvec_efficiency.get(unquantised_dtype(stored), 1.0)
    stream = device.weight_stream_bytes_per_second.get(stored)
    if stream:
        weight_efficiency = stream / device.memory_bandwidth_bytes_per_second
    intra = (
        cluster.intra_node_bandwidth_bytes_per_second
        or device.intra_node_bandwidth_bytes_per_second
        or DEFAULT_INTRA_NODE_BYTES_PER_S
    )
    inter = cluster.inter_node_bandwidth_bytes_per_second or DEFAULT_INTER_NODE_BYTES_PER_S
    overhead = device.op_overhead_seconds
    # Measured links already include the efficiency of collectives.
    measured = cluster.collective_latency_seconds
    inside = 1.0 if measured is not None else engine.link_efficiency
    latency = engine.collective_latency_s if measured is None else measured
    hop = cluster.hand_over_latency_seconds
    return Rates(
        peak_flops_per_s=peak,
        compute_efficiency=efficiency,
        wide_peak_flops_per_s=wide_peak,
        wide_efficiency=wide_efficiency,
        memory_bytes_per_s=device.memory_bandwidth_bytes_per_second,
        weight_efficiency=weight_efficiency,
        stream_efficiency=stream_efficiency,
        kv_efficiency=kv_efficiency,
        link_bytes_per_s=intra * inside,
        inter_node_bytes_per_s=inter * engine.link_efficiency,
        latency_s=latency,
        hop_latency_s=latency if hop is None else hop,
        op_overhead_s=engine.op_overhead_s if overhead is None else overhead,
    )
