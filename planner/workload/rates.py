"""Compute, memory and link rates of a device for a pair of formats, with fitted factors."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from planner.catalog.engines import Engine
from planner.cost.quantity import Flag, any_of, both, where
from planner.cost.queueing import ArrivalHabits
from planner.cost.weights import SIXTEEN_BIT, WIDE, unquantised_dtype
from planner.errors import BadRequestError
from planner.specs.base import Dtype
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.workload.layouts import Layout

# Peak rates of devices, with fallbacks for formats that a device lacks.


CONSUMER_FALLBACK: dict[Dtype, tuple[Dtype, ...]] = {
    "fp32": (),
    "tf32": ("fp32",),
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "fp8": ("bf16", "fp16", "fp32"),
    "int8": ("bf16", "fp16", "fp32"),
    "nvfp4": ("fp8", "bf16", "fp16", "fp32"),
    "mxfp4": ("fp8", "bf16", "fp16", "fp32"),
    "int4": ("int8", "bf16", "fp16", "fp32"),
}


def peak_of(device: DeviceSpec, dtype: Dtype) -> tuple[float, Dtype]:
    """Return the device's dense peak for a dtype or the nearest wider one that it supports.

    Raises:
        BadRequestError: the device has no peak at all.
    """

    def rate(name: Dtype) -> float:
        return device.peak_flops_per_second.get(name, 0.0)

    for candidate in (dtype, *CONSUMER_FALLBACK.get(dtype, ("bf16", "fp16", "fp32"))):
        if candidate in device.peak_flops_per_second:
            wider = max(CONSUMER_FALLBACK.get(candidate, ()) or (candidate,), key=rate)
            best = max(
                candidate, wider, key=rate
            )  # skip narrow units that are slower than wide ones
            return rate(best), best
    if device.peak_flops_per_second:
        widest = next(iter(device.peak_flops_per_second))
        return device.peak_flops_per_second[widest], widest
    raise BadRequestError(
        f"device {device.id} has no peak_flops_per_second: nobody published one; "
        "give the device as an object with the rate of at least one dtype",
        "cluster.device.peak_flops_per_second",
    )


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


# Factors of operators and arrivals from published serving sweeps for a model, chip and layout.
#
# The most specific measured key applies: layout of a model and chip pair, the pair, the chip
# family or all. Factors of the requested engine release, if measured, precede those over all
# releases.


ANYWHERE = "any"
RELEASE = "@"
# Parts without fitted factors use the factor of the most similar part.
SHOWN_BY = {"experts": "linear", "further": "issue"}


def release_key(place: str, release: str) -> str:
    """Return the key of factors measured with one engine release.

    >>> release_key("32x4096x0/hopper", "1.0.0rc3")
    '32x4096x0/hopper@1.0.0rc3'
    """
    return f"{place}{RELEASE}{release}"


@dataclass(frozen=True)
class Swept:
    """The sweep factors of one engine; ``chip`` is a key of pair, device and weight format.

    If the layout has columns, each row gets the factors of its own layout.
    """

    engine: Engine
    pair: str
    chip: str
    layout: Layout
    release: str = ""

    @property
    def layout_name(self) -> str:
        """Return the key of the pair's factors for this layout."""
        ranks = (self.layout.tensor, self.layout.expert, self.layout.attention_data)
        return f"{self.chip}/{'-'.join(str(int(count)) for count in ranks)}"

    def factor(self, part: str) -> float:
        """Return the factor for a part of a pass; 1 if no sweep measured it or a similar part."""
        phase, _, operator = part.partition("_")
        similar = f"{phase}_{SHOWN_BY.get(operator, operator)}"

        def factor_in(place: Mapping[str, float]) -> float:
            return place.get(part, place.get(similar, 1.0))

        factor = factor_in(self._place)
        for name, is_here in self._layouts:
            factor = where(is_here, factor_in(self.engine.serving_factors[name]), factor)
        return factor

    @cached_property
    def _place(self) -> Mapping[str, float]:
        """Return the most specific factors, except those of single layouts."""
        places = self.engine.serving_factors
        names = (self._release_key, self.pair, self.pair.rpartition("/")[2], ANYWHERE)
        return next((places[name] for name in names if name in places), {})

    @cached_property
    def habits(self) -> ArrivalHabits:
        """Return the arrival parameters for this pair, or those over all pairs."""
        places = self.engine.arrival_factors
        names = (self._release_key, self.pair, ANYWHERE)
        values = dict(next((places[name] for name in names if name in places), {}))
        for name, is_here in self._layouts:
            for habit, default in values.items():
                values[habit] = where(is_here, places[name].get(habit, default), default)
        return ArrivalHabits(**values)

    @cached_property
    def _layouts(self) -> tuple[tuple[str, Flag], ...]:
        """Return the measured layouts of the pair, each with whether this layout matches."""
        prefix = f"{self.chip}/"
        names = (name for name in self.engine.serving_factors if name.startswith(prefix))
        split = ((name, *name.removeprefix(prefix).partition(RELEASE)[::2]) for name in names)
        # The factors of a release come after, and override, those over all releases.
        ordered = sorted(one for one in split if one[2] in {"", self.release})
        matches = ((name, self._is_here(ranks)) for name, ranks, _ in ordered)
        return tuple((name, is_here) for name, is_here in matches if any_of(is_here))

    @property
    def _release_key(self) -> str:
        """Return the key of the pair's factors for this engine release."""
        return release_key(self.pair, self.release)

    def _is_here(self, ranks: str) -> Flag:
        """Return whether the layout has exactly these ranks and no other parallelism."""
        tensor, expert, attention = (int(count) for count in ranks.split("-"))
        own = self.layout
        split = both(own.tensor == tensor, own.expert == expert)
        whole = both(own.attention_data == attention, own.pipeline * own.context == 1)
        return both(split, whole)
