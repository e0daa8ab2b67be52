"""Achieved rates of a device, and the setting in which an estimate is made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar, cast

from planner.catalog.engines import Engine, release_number, sixteen_bit_dtype, sources
from planner.catalog.gguf import PackedFormat, packed_format
from planner.cost.column import single
from planner.cost.communication import StageShare, stage_shares
from planner.cost.parameters import ParameterCounts
from planner.cost.quantity import Flag, Line, Origin, Quantity, any_of, both, where
from planner.cost.weights import (
    BITS_PER_BYTE,
    SIXTEEN_BIT,
    WIDE,
    WeightFormat,
    element_bytes,
    formats_of,
    packed_formats,
    padded_expert_ratio,
    runs_sparse,
    stored_bits,
    unquantised_dtype,
    weight_bytes_per_element,
)
from planner.specs.base import BadRequestError, Dtype, OperatorClass
from planner.specs.cluster import ClusterSpec, DeviceSpec
from planner.specs.estimate import HostCalibration
from planner.specs.model import ModelSpec, WeightPart
from planner.specs.workload import OffloadSpec, ServeWorkload, Strategy, TrainWorkload, Workload
from planner.workload.layouts import Layout, StagePlace

# ---------------------------------------------------------------------------
# Compute, memory and link rates of a device for a pair of formats, with fitted factors.
# ---------------------------------------------------------------------------


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


def peak_of(
    device: DeviceSpec, dtype: Dtype, *, ggml_kernels: bool = False
) -> tuple[float, Dtype]:
    """Return the device's dense peak for a dtype or the nearest wider one that it supports.

    A narrow format whose units are slower than wider ones is computed in the wider format. 16 bits
    are not, but by ggml: frameworks compute the format that they are told (measured on a processor
    without bf16 units: 836 to 1,259 tokens/s of training in bf16, 6,296 to 11,826 in fp32).

    Raises:
        BadRequestError: the device has no peak at all.
    """

    def rate(name: Dtype) -> float:
        return device.peak_flops_per_second.get(name, 0.0)

    for candidate in (dtype, *CONSUMER_FALLBACK.get(dtype, ("bf16", "fp16", "fp32"))):
        if candidate in device.peak_flops_per_second:
            if candidate in SIXTEEN_BIT and not ggml_kernels:
                return rate(candidate), candidate
            best = max((candidate, *CONSUMER_FALLBACK.get(candidate, ())), key=rate)
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
    peak, used = peak_of(device, computed, ggml_kernels=engine.ggml_kernels)
    if engine.ggml_kernels and used in SIXTEEN_BIT and device.halves_wide_sums:
        peak *= 2
    wide_peak, wide = (
        (peak, used) if used in WIDE else peak_of(device, "bf16", ggml_kernels=engine.ggml_kernels)
    )
    efficiency, wide_efficiency = (
        device.achieved_flops_per_second[dtype] / rate
        if dtype in device.achieved_flops_per_second
        else engine.matmul_efficiency
        for dtype, rate in ((used, peak), (wide, wide_peak))
    )
    weight_efficiency, kv_efficiency = engine.weight_read_efficiency, engine.kv_read_efficiency
    if device.provenance == "measured":
        efficiency = wide_efficiency = engine.measured_matmul_efficiency
        ratio = engine.measured_bandwidth_ratio
        weight_efficiency = 1.0 if ratio is None else min(1.0, weight_efficiency / ratio)
        kv_efficiency = 1.0 if ratio is None else min(1.0, kv_efficiency / ratio)
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
    # Measured links already include the efficiency of collectives.
    measured = cluster.collective_latency_seconds
    inside = 1.0 if measured is not None else engine.link_efficiency
    is_staged = "GeForce" in (device.name or "") and (device.link or "").startswith("PCIe")
    is_staged = is_staged and cluster.intra_node_bandwidth_bytes_per_second is None
    staged = engine.staged_collective_latency_s if is_staged else 0.0
    latency = staged or engine.collective_latency_s if measured is None else measured
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
        op_overhead_s=_issue_seconds(engine, device),
    )


def _issue_seconds(engine: Engine, device: DeviceSpec) -> float:
    """Return the seconds of one of the engine's counted operators.

    On a GPU ``op_overhead_s`` was fitted on published runs, together with the engine's count of
    operators. A host that issues operators more slowly than those takes longer in proportion; one
    that issues them faster is not known to gain.
    """
    measured = device.op_overhead_seconds
    if measured is None:
        return engine.op_overhead_s
    if engine.measured_issue_s is None:
        return measured
    return engine.op_overhead_s * max(1.0, measured / engine.measured_issue_s)


# Factors of operators and waits from published serving sweeps for a model, chip and layout.
#
# The most specific measured key applies: layout of a model and chip pair, the pair, the chip
# family or all. Factors of the requested engine release, if measured, precede those over all
# releases.


ANYWHERE = "any"
RELEASE = "@"
LEAST_BUILD = 1000
# Parts without fitted factors use the factor of the most similar part.
SHOWN_BY = {"experts": "linear", "further": "issue"}


def release_key(place: str, release: str) -> str:
    """Return the key of factors measured with one engine release.

    >>> release_key("32x4096x0/hopper", "1.0.0rc3")
    '32x4096x0/hopper@1.0.0rc3'
    """
    return f"{place}{RELEASE}{release}"


def stream_level(since: int | None, release: str) -> str:
    """Return the level of a release before the one since which kernels are as now, else nothing.

    Levels are numbers of builds; a front end's own releases, such as 0.12, are none.

    >>> stream_level(6700, "b6119"), stream_level(6700, "b9187"), stream_level(6700, "")
    ('6700', '', '')
    """
    number = next(iter(release_number(release)), 0)
    return str(since) if since and LEAST_BUILD <= number < since else ""


@dataclass(frozen=True)
class SweepFactors:
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
        return f"{self.chip}/{'-'.join(str(single(count)) for count in ranks)}"

    def factor(self, part: str) -> float:
        """Return the factor for a part of a pass; 1 if no sweep measured it or a similar part."""
        phase, _, operator = part.partition("_")
        similar = f"{phase}_{SHOWN_BY.get(operator, operator)}"

        def factor_in(place: Mapping[str, float]) -> float:
            return place.get(part, place.get(similar, 1.0))

        factor = factor_in(self._place)
        for name, is_here in self._measured_layouts:
            factor = where(is_here, factor_in(self.engine.serving_factors[name]), factor)
        return factor

    @cached_property
    def _place(self) -> Mapping[str, float]:
        """Return the most specific factors, except those of single layouts."""
        places = self.engine.serving_factors
        names = (self._release_key, self.pair, self.pair.rpartition("/")[2], ANYWHERE)
        return next((places[name] for name in names if name in places), {})

    @cached_property
    def _measured_layouts(self) -> tuple[tuple[str, Flag], ...]:
        """Return the measured layouts of the pair, each with whether this layout matches."""
        prefix = f"{self.chip}/"
        names = (name for name in self.engine.serving_factors if name.startswith(prefix))
        split = ((name, *name.removeprefix(prefix).partition(RELEASE)[::2]) for name in names)
        # The factors of a release come after, and override, those over all releases.
        ordered = sorted(one for one in split if one[2] in {"", self.release})
        matches = ((name, self._matches_layout(ranks)) for name, ranks, _ in ordered)
        return tuple((name, is_here) for name, is_here in matches if any_of(is_here))

    @property
    def _release_key(self) -> str:
        """Return the key of the pair's factors for this engine release."""
        return release_key(self.pair, self.release)

    def _matches_layout(self, ranks: str) -> Flag:
        """Return whether the layout has exactly these ranks and no other parallelism."""
        tensor, expert, attention = (int(count) for count in ranks.split("-"))
        own = self.layout
        split = both(own.tensor == tensor, own.expert == expert)
        whole = both(own.attention_data == attention, own.pipeline * own.context == 1)
        return both(split, whole)


# ---------------------------------------------------------------------------
# The fully resolved input of an estimate, with every default filled in.
# ---------------------------------------------------------------------------


T = TypeVar("T")
LineName = tuple[str, str, OperatorClass | None, str]  # group, name, operator class, key

MODELLED = Origin()
# Parts whose kernels reach a different share of the peak on 8-bit and 4-bit units.
WEIGHT_PRODUCTS = frozenset({"linear", "experts"})
UNIT_WIDTHS = {1.0: "8bit", 0.5: "4bit"}
ANY_ARCHITECTURE = "any"
NARROW_BYTES = 0.75  # between 6 and 7 bits: wider weights are costed as 8-bit
LONE = [1, 1]  # one source, one device
DEFAULT_DISK_BYTES_PER_S = 1e9
DEFAULT_HOST_LINK_BYTES_PER_S = 16e9
HOST_LINK_EFFICIENCY = 0.82  # FlexLLMGen cost_model.py: 12.9 of the 15.8 GB/s of a T4's link
DESKTOP_MEMORY_BYTES_PER_S = 80e9  # two channels of DDR5
SERVER_MEMORY_BYTES_PER_S = 200e9  # eight channels of DDR4


HOST_SHARES = ("weights_cpu", "kv_cpu", "activations_cpu")
# Full-batch passes without fitted factors use those of the most similar pass.
SIMILAR_PASS = {"mixed": "prefill", "packed": "decode", "beside": "packed"}
# Steps of a replica that is not full: they have the factors of prefill and, where requests decode
# in them, of decode.
UNTIL_FIRST_TOKEN, BETWEEN_TOKENS = "until the first token", "between tokens"
BURST_STEP, DECODING = "in a burst", ", decoding"
READING = (UNTIL_FIRST_TOKEN, BETWEEN_TOKENS, BURST_STEP)
PASS_OF = {
    **dict.fromkeys(READING, "prefill"),
    **{f"{group}{DECODING}": "decode" for group in READING},
}


@dataclass(frozen=True)
class Setting:
    """One strategy on one cluster, with every default filled in.

    ``split`` is the number of layers per pipeline stage if the split is uneven; ``places`` is the
    device of each stage if the stages are heterogeneous.
    """

    model: ModelSpec
    counts: ParameterCounts
    device: DeviceSpec
    cluster: ClusterSpec
    workload: Workload
    engine: Engine
    strategy: Strategy
    layout: Layout
    host_calibration: HostCalibration | None = None
    split: tuple[Quantity, ...] = ()
    places: tuple[StagePlace, ...] = ()
    warnings: list[str] = field(default_factory=list)
    # Cached costs of this setting; a changed copy starts empty.
    remembered: dict[str, object] = field(default_factory=dict, init=False, compare=False)
    # Costs that changed copies share, by all that they depend on beside model and hardware.
    shared: dict[object, object] = field(default_factory=dict, compare=False)

    def cached_cost(self, name: str, cost: Callable[[], T]) -> T:
        """Return a named cost of this setting, computed once and cached."""
        if name not in self.remembered:
            self.remembered[name] = cost()
        return cast("T", self.remembered[name])

    def shared_cost(self, key: object, cost: Callable[[], T]) -> T:
        """Return a cost that copies of this setting share which have the same key."""
        if key not in self.shared:
            self.shared[key] = cost()
        return cast("T", self.shared[key])

    @property
    def is_measured(self) -> bool:
        """Return whether the device's rates were measured on the host itself."""
        return self.device.provenance == "measured"

    @property
    def keeps_published_factors(self) -> bool:
        """Return whether factors that were fitted on published runs hold for the device's rates.

        A measured processor's rates replace them. A measured GPU's rates say how far it is from a
        healthy one; how well kernels use it is known from the published runs.
        """
        return not self.is_measured or self.engine.measured_bandwidth_ratio is not None

    @property
    def on_shared_processor(self) -> bool:
        """Return whether Slipway's runner has several ranks on the cores of one processor."""
        return self.cluster.ranks_per_core is not None and self.engine.role == "runner"

    @property
    def weight_dtype(self) -> Dtype:
        """Return the dtype in which the linear weights are stored."""
        return self.strategy.weight_dtype or "bf16"

    @property
    def activation_dtype(self) -> Dtype:
        """Return the dtype of the activations between layers."""
        return self.strategy.activation_dtype or "bf16"

    @property
    def keeps_every_second_product(self) -> bool:
        """Return whether selective recomputation is torchtitan's, not Megatron's."""
        return self.engine.selective_recomputation == "every_second_product"

    @property
    def widens_the_rest(self) -> bool:
        """Return whether all weights but the packed ones, and the activations, are fp32."""
        named = self.strategy.quantization or self.weight_dtype
        is_trained = isinstance(self.workload, TrainWorkload)
        return named in self.engine.fp32_beside_packed and (
            is_trained or self.engine.role == "training"
        )

    @cached_property
    def rates(self) -> Rates:
        """Return the compute, memory and link rates of the operators."""
        dtypes = (compute_dtype_of(self), self.weight_dtype)
        return rates_for(self.cluster, self.device, self.engine, dtypes)

    @cached_property
    def unit_width(self) -> str:
        """Return the operand width of matrix products: wide, 8bit or 4bit."""
        _, used = peak_of(
            self.device, compute_dtype_of(self), ggml_kernels=self.engine.ggml_kernels
        )
        return UNIT_WIDTHS.get(element_bytes(used), "wide")

    @cached_property
    def shares(self) -> tuple[StageShare, ...]:
        """Return the share of the model on each pipeline stage."""
        return stage_shares(self.model, self.layout.pipeline, self.split)

    @cached_property
    def packed(self) -> PackedFormat | None:
        """Return the element sizes of a file format such as gguf:q4_k_m."""
        named = self.strategy.quantization
        if ":" not in (named or ""):
            named = self.engine.file_formats.get(self.weight_dtype, named)
        return packed_format(named, self.model)

    @cached_property
    def weight_element_bytes(self) -> float:
        """Return the stored bytes of one linear weight, metadata included."""
        if self.packed is not None:
            return self.packed.linear_bytes_per_element
        whole = self.strategy.quantization == "bnb.nf4"
        group, model = self.strategy.group_size, self.model
        published = (model.weight_dtype, model.group_size) == (self.weight_dtype, group)
        dense = weight_bytes_per_element(
            self.weight_dtype,
            group,
            whole_scales=whole,
            group_bits=model.group_metadata_bits if published else None,
        )
        if not self.skips_zeros:
            return dense
        bits = element_bytes(self.weight_dtype) * BITS_PER_BYTE
        return dense - (bits - stored_bits(bits)) / BITS_PER_BYTE

    @cached_property
    def skips_zeros(self) -> bool:
        """Return whether kernels use the zeros of pruned weights."""
        return runs_sparse(self.strategy.sparsity or 0.0, self.engine.key, self.device)

    @cached_property
    def weight_formats(self) -> tuple[WeightFormat, ...]:
        """Return the storage formats of the parts of the layers, the main one first.

        A strategy that takes the checkpoint as published keeps its wider parts.
        """
        file = self.packed
        if file is not None and file.dense_bits is not None and file.expert_bits is not None:
            return packed_formats(self.weight_dtype, file.dense_bits, file.expert_bits)
        packed = file is not None and self.strategy.quantization != self.model.quantization
        overrides = packed or self.weight_dtype != self.model.weight_dtype
        part_dtypes = {} if overrides else self.model.part_dtypes
        return formats_of(self.weight_dtype, self.weight_element_bytes, part_dtypes)

    def format_of(self, part: WeightPart) -> WeightFormat:
        """Return the storage format of a part of the layers."""
        return next(stored for stored in self.weight_formats if part in stored.parts)

    @cached_property
    def expert_padding(self) -> Quantity:
        """Return loaded over published weights of experts; some kernels pad MXFP4 experts."""
        known, device, model = self.engine.mxfp4_expert_multiples, self.device, self.model
        multiples = known.get(device.architecture) or known.get(ANY_ARCHITECTURE)
        padded = self.format_of("experts").dtype == "mxfp4" and model.is_moe
        if multiples is None or not padded or device.vendor != "NVIDIA":
            return 1.0
        hidden = model.expert_hidden_size or model.hidden_size
        column_ranks = self.layout.expert_group / self.layout.expert
        return padded_expert_ratio(hidden, model.moe_intermediate_size, column_ranks, multiples)

    @cached_property
    def plain_element_bytes(self) -> float:
        """Return the bytes of one embedding, norm or output-head weight."""
        return element_bytes(unquantised_dtype(self.weight_dtype))

    @cached_property
    def small_element_bytes(self) -> float:
        """Return the stored bytes of one norm, bias or router weight."""
        return self.packed.small_bits / BITS_PER_BYTE if self.packed else self.plain_element_bytes

    @cached_property
    def vocabulary_element_bytes(self) -> float:
        """Return the mean stored bytes of one embedding or output-head weight."""
        if self.has_integer_vocabulary:
            return self.weight_element_bytes
        if self.packed is None:
            return self.plain_element_bytes
        if self.model.tie_word_embeddings:
            return self.packed.head_bytes_per_element
        return self.packed.vocabulary_bytes_per_element

    @cached_property
    def has_integer_vocabulary(self) -> bool:
        """Return whether training stores every matrix in 8 bits with a fused update (QFT)."""
        is_qft = isinstance(self.workload, TrainWorkload) and self.workload.method == "qft"
        return is_qft and self.engine.trains_integers_fused

    @cached_property
    def head_element_bytes(self) -> float:
        """Return the bytes per weight that the output-head product reads."""
        return self.packed.head_bytes_per_element if self.packed else self.plain_element_bytes

    @cached_property
    def activation_element_bytes(self) -> float:
        """Return the bytes of one residual element, at least those of 16 bits."""
        return max(element_bytes(self.activation_dtype), element_bytes("bf16"))

    @cached_property
    def kv_element_bytes(self) -> float:
        """Return the bytes of one cached key or value element."""
        if any_of(self.layout.cache_element_bytes > 0):
            return self.layout.cache_element_bytes
        return element_bytes(self.strategy.kv_cache_dtype or "bf16")

    @property
    def devices_in_use(self) -> float:
        """Return the devices of the layout, and those that generate completions for it."""
        rollout = self.strategy.rollout
        return self.layout.devices + (rollout.devices if rollout else 0)

    @property
    def generating_dtype(self) -> Dtype:
        """Return the 16-bit format in which a policy in training is loaded to generate."""
        return sixteen_bit_dtype(self.device)

    @property
    def host_link_bytes_per_s(self) -> float:
        """Return the bandwidth between the device and its host in bytes per second."""
        published = self.device.host_to_device_bandwidth_bytes_per_second
        effective = (published or DEFAULT_HOST_LINK_BYTES_PER_S) * HOST_LINK_EFFICIENCY
        return self.cluster.host_to_device_bandwidth_bytes_per_second or effective

    @property
    def host_memory_bytes_per_s(self) -> float:
        """Return the host's memory bandwidth; hosts of desktop GPUs default to desktop memory."""
        desktop = self.device.halves_wide_sums or self.device.kind == "uma"
        usual = DESKTOP_MEMORY_BYTES_PER_S if desktop else SERVER_MEMORY_BYTES_PER_S
        return self.cluster.host_memory_bandwidth_bytes_per_second or usual

    @property
    def disk_bytes_per_s(self) -> float:
        """Return the bandwidth of the host's disk."""
        return self.cluster.disk_bandwidth_bytes_per_second or DEFAULT_DISK_BYTES_PER_S

    @property
    def shares_host_memory(self) -> bool:
        """Return whether the device's memory is the host's: on a CPU, or unified memory."""
        return self.device.kind in {"cpu", "uma"}

    @cached_property
    def offload(self) -> OffloadSpec:
        """Return the offload settings; nothing moves to the host where it has the same memory."""
        offload = self.strategy.offload or OffloadSpec()
        if not self.shares_host_memory or isinstance(self.workload, TrainWorkload):
            return offload
        return offload.model_copy(update=dict.fromkeys(HOST_SHARES, 0.0))

    def factor(self, operator_class: OperatorClass) -> float:
        """Return this host's calibration factor for an operator class."""
        if self.host_calibration is None:
            return 1.0
        calibration = self.host_calibration.factors.get(operator_class)
        return calibration.factor if calibration else 1.0

    def training_factor(self, part: str) -> float:
        """Return the factor for a part of the step, fitted on published training runs."""
        fitted, device = self.engine.training_factors, self.device
        names = (device.id, device.architecture, ANY_ARCHITECTURE)
        return next((fitted[name] for name in names if name in fitted), {}).get(part, 1.0)

    @cached_property
    def sweep_factors(self) -> SweepFactors:
        """Return the factors of published serving sweeps for this model, chip and layout."""
        chip = f"{self.pair}/{self.device.id}/{self.weight_dtype}"
        return SweepFactors(self.engine, self.pair, chip, self.layout, self.engine.release)

    def serving_factor(self, part: str) -> float:
        """Return the factor for a part of a pass, fitted on published serving sweeps."""
        phase, _, operator = part.partition("_")
        if phase in SIMILAR_PASS:
            return self._full_batch_factor(phase, operator)
        part = f"{PASS_OF.get(phase, phase)}_{operator}" if operator else part
        return self.sweep_factors.factor(part) * self._single_stream_factor(part)

    @cached_property
    def _full_batch_factors(self) -> dict[str, float]:
        """Return the full-batch factors of this architecture, or the engine's general ones."""
        fitted = self.engine.full_factors
        return fitted.get(self.device.architecture) or fitted.get(ANY_ARCHITECTURE, {})

    def _full_batch_factor(self, phase: str, operator: str) -> float:
        """Return the factor for a part of a full-batch step, fitted on published tables."""
        shown = f"{phase}_{SHOWN_BY.get(operator, operator)}"
        if shown not in self._full_batch_factors:
            return self.serving_factor(f"{SIMILAR_PASS[phase]}_{operator}")
        return self._full_batch_factors.get(f"{phase}_{operator}", self._full_batch_factors[shown])

    def routing_passes(self, group: str) -> float:
        """Return how often a routed token is read or written, fitted on full-batch tables."""
        return self._full_batch_factors.get(f"{group}_routing", 0.0)

    @cached_property
    def _single_stream_factors(self) -> dict[str, float]:
        """Return single-stream factors; none on a measured processor or a generic server."""
        engine, device, factors = self.engine, self.device, self.engine.stream_factors
        serves = engine.is_generic and isinstance(self.workload, ServeWorkload)
        if serves or not self.keeps_published_factors:
            return {}
        places = (device.family, device.kernels, device.kind)
        level = self.stream_level
        names = (*(release_key(place, level) for place in places if level), *places)
        return next((factors[name] for name in names if name in factors), {})

    @property
    def stream_level(self) -> str:
        """Return the level of the engine's release on these chips, empty for the newest."""
        since = self.engine.stream_levels.get(self.device.kernels)
        return stream_level(since, self.engine.release)

    @property
    def stream_spreads(self) -> Mapping[str, float]:
        """Return the log spreads of single streams on these chips, by pass."""
        spreads = self.engine.stream_spreads
        return spreads.get(self.device.kernels) or spreads.get(self.device.kind, {})

    @property
    def replays_single_steps(self) -> bool:
        """Return whether decode steps of one sequence replay a recorded CUDA graph."""
        least = self.engine.replays_single_steps_from
        return least is not None and (self.device.compute_capability or 0.0) >= least

    @property
    def replayed_share(self) -> float:
        """Return the share of the launches of a step that are left when it is replayed."""
        return self._single_stream_factors.get("decode_replay", 1.0)

    @cached_property
    def lone_streams(self) -> tuple[str, ...]:
        """Return the passes that one source measured on one device, at this width of weights."""
        if self.is_measured or not self._single_stream_factors:
            return ()
        by_chips, width = self.engine.stream_support, width_of(self)
        support = by_chips.get(self.device.kernels) or by_chips.get(self.device.kind, {})
        passes = ("prefill", "decode")
        return tuple(name for name in passes if support.get(f"{name}_{width}") == LONE)

    def power_factor(self, group: str) -> float:
        """Return the factor for seconds under the power limit, fitted on single streams.

        Zero if no such pass was published, or if the host measured what its power limit leaves.
        Narrow weights add the cost of unpacking.
        """
        if self.is_measured:
            return 0.0
        family, group = self._single_stream_factors, PASS_OF.get(group, group)
        narrow = family.get(f"{group}_linear_{width_of(self)}", 1.0)
        return family.get(f"{group}_power", 0.0) * narrow

    def _single_stream_factor(self, part: str) -> float:
        """Return the factor for a part of a pass, fitted on published single streams.

        Kernels for 8-bit and 4-bit weights reach a different share of the bandwidth.
        """
        family = self._single_stream_factors
        dense = part.replace("_experts", "_linear")
        narrow = family.get(f"{dense}_{width_of(self)}", 1.0)
        beside = family.get(part, 1.0) if part != dense else 1.0
        return family.get(dense, 1.0) * narrow * beside

    @cached_property
    def pair(self) -> str:
        """Return the key of serving factors: model shape and chip architecture."""
        return f"{self.model.shape}/{self.device.architecture}"

    def line(
        self, group: str, name: str, operator_class: OperatorClass | None = None, key: str = ""
    ) -> Line:
        """Return the ledger line of a term, with the host's factor and the origin of its rates."""
        where = (group, name, operator_class, key)
        cached = self._lines.get(where)
        if cached is None:
            factor = self.factor(operator_class) if operator_class else 1.0
            cached = self._lines[where] = self._line(where, factor)
        return cached

    def part_line(
        self, group: str, name: str, part: str, operator_class: OperatorClass, key: str = ""
    ) -> Line:
        """Return the ledger line of a part of a pass, with its published serving factor.

        Matrix-product kernels reach a different share of the peak on 8-bit and 4-bit units.
        """
        group_part = f"{group}_{part}"
        where = (group_part, name, operator_class, key)
        cached = self._lines.get(where)
        if cached is None:
            factor = self.factor(operator_class) * self.serving_factor(group_part)
            if part in WEIGHT_PRODUCTS:
                phase = PASS_OF.get(group, group)
                factor *= self.sweep_factors.factor(f"{phase}_{self.unit_width}")
            cached = self._line((group, name, operator_class, key), factor)
            self._lines[where] = cached
        return cached

    def _line(self, where: LineName, factor: float) -> Line:
        group, name, operator_class, key = where
        origin = self._origins.get(operator_class, MODELLED)
        return Line(group, name, key, operator_class, factor, origin)

    @cached_property
    def _lines(self) -> dict[LineName, Line]:
        """Return the cache of ledger lines; an estimate uses each line many times."""
        return {}

    @cached_property
    def _origins(self) -> dict[OperatorClass | None, Origin]:
        """Return the origin of the rates of each operator class."""
        origins: dict[OperatorClass | None, Origin] = {
            "compute": Origin("modelled", sources()["matmul"]),
            "memory_bandwidth": Origin("modelled", sources()["blis"]),
            "communication": Origin("modelled", sources()["nccl"]),
            "overhead": Origin(
                "modelled", sources()["eager" if self.engine.ops_per_layer else "blis"]
            ),
        }
        if self.is_measured:
            when = f" on {self.device.as_of}" if self.device.as_of else ""
            measured = Origin("measured", f"rates measured on this host{when}")
            origins["compute"] = origins["memory_bandwidth"] = measured
        return origins


def width_of(setting: Setting) -> str:
    """Return the stored width of the weights: wide, 8bit or 4bit."""
    if setting.weight_dtype in WIDE:
        return "wide"
    return "8bit" if setting.weight_element_bytes > NARROW_BYTES else "4bit"


def compute_dtype_of(setting: Setting) -> Dtype:
    """Return the dtype in which matrix products run.

    With weight-only quantisation, weights are dequantised to the dtype of the activations.
    """
    return setting.strategy.compute_dtype or setting.activation_dtype
