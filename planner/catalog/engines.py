"""What each engine supports, and the limits that make it refuse a strategy."""

import hashlib
import re
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

from pydantic import Field

from planner.catalog.reading import data_json, data_text, data_toml
from planner.cost.queueing import Client
from planner.cost.training import LOSS_FP32_COPIES
from planner.cost.weights import WIDE
from planner.specs.base import BadRequestError, Dtype, Spec
from planner.specs.cluster import DeviceKind, DeviceSpec
from planner.specs.estimate import HostCalibration
from planner.specs.model import ModelSpec, WeightPart
from planner.specs.workload import Recomputation

# ---------------------------------------------------------------------------
# Engines: defaults, and efficiencies for hosts without measurements.
# ---------------------------------------------------------------------------


DEFAULT_ENGINE = "torch"
COMMON_TRAINING, COMMON_SERVING = "common_training", "common_serving"
COMMON = {"training": COMMON_TRAINING, "serving": COMMON_SERVING}
STREAM = ("stream_factors", "stream_spreads", "stream_support", "lone_stream_spread")
STEP = ("training_factors", "step_spreads")
EngineRole = Literal["runner", "serving", "training"]
# What an engine's share of memory limits: everything on the device, weights and KV cache without
# activations, or the KV cache as a share of what is free after loading.
MemoryShare = Literal["device", "weights_and_cache", "free"]
NUMBER = re.compile(r"\d+")
MISSPELT_RATIO = 0.8  # of the letters of a known name: vlm, sglan, tensorrt_lm


class CapturedGraphs(Spec):
    """The CUDA graphs that a release captures at its start, and their bytes on one device.

    A graph is captured for batches of 1, 2 and 4 tokens and each multiple of 8 up to
    ``most_tokens``; from ``coarse_from`` tokens on, each multiple of 16. With one mode, graphs of
    mixed batches are captured; with two ``modes`` also those of decode steps. A graph has
    ``bytes_per_layer``, or ``collective_bytes_per_layer`` where NCCL does the all-reduces.
    ``in_budget``: graphs are part of the memory share that the engine is started with, such as
    vLLM's ``gpu_memory_utilization``; otherwise they come on top of it.
    """

    modes: int
    most_tokens: int
    coarse_from: int = 1024
    bytes_per_layer: float
    collective_bytes_per_layer: float = 0.0
    in_budget: bool = False


class Engine(Spec):
    """The planner's figures for one engine on one kind of device.

    ``*_efficiency`` are shares of the device's published peaks, ``*_s`` seconds, ``*_bytes`` bytes
    of one device. Other fields are the engine's defaults, and how it allocates memory.

    Source: ``data/engines.toml``, which cites each figure.
    """

    key: str
    title: str
    role: EngineRole
    is_generic: bool = False
    release: str = ""
    matmul_efficiency: float = Field(gt=0, le=1)
    measured_matmul_efficiency: float = Field(gt=0, le=1)
    # Of a micro-benchmark on a healthy device: its bandwidth over the published one, and the time
    # to issue an operator on hosts where ``op_overhead_s`` holds. A processor has no datasheet:
    # its efficiencies are 1 and its overhead is as measured.
    measured_bandwidth_ratio: float | None = Field(default=None, gt=0, le=1)
    measured_issue_s: float | None = None
    weight_read_efficiency: float = Field(gt=0, le=1)
    kv_read_efficiency: float = Field(gt=0, le=1)
    link_efficiency: float = Field(gt=0, le=1)
    collective_latency_s: float
    # Between cards without peer-to-peer access, which exchange through the host; 0: the same.
    staged_collective_latency_s: float = 0.0
    op_overhead_s: float
    ops_per_layer: float = 0.0
    dequantise_ops: dict[Dtype, float] = Field(default_factory=dict)
    matvec_efficiency: dict[Dtype, float] = Field(default_factory=dict)
    training_elementwise_efficiency: float = Field(default=1.0, gt=0, le=1)
    layer_overhead_s: float = 0.0
    # The CUDA compute capability from which decode steps of one sequence replay a recorded graph.
    replays_single_steps_from: float | None = None
    # By chips: the release at which kernels of single streams changed; older ones have factors of
    # their own.
    stream_levels: dict[str, int] = Field(default_factory=dict)
    request_overhead_s: float = 0.0
    step_overhead_s: float = 0.0
    request_latency_s: float = 0.0
    usable_memory_ratio: float
    memory_utilisation: float = 1.0
    memory_share_of: MemoryShare = "device"
    runtime_overhead_bytes: int
    # Of a device that exchanges with others of its replica over links beside the PCIe bus.
    communicator_bytes: float = 0.0
    max_batch_tokens: int = 0
    has_recv_interval: bool = False  # SGLang's scheduler_recv_interval
    # The most requests that a rank runs at once unless told otherwise, on devices of less and of
    # more than 70 GiB; 0 without a limit.
    default_max_requests: tuple[int, int] = (0, 0)
    # Steps that are scheduled while another still runs: a request that comes then is not in them.
    steps_scheduled_ahead: int = 0
    # Memory of the largest step is set aside at the start, whether or not requests fill it: of
    # all tokens of a step, and of as many requests as the engine takes on a device.
    reserves_largest_step: bool = False
    bytes_per_logit: float | None = None
    # Whether FP8 made while loading replaces each 16-bit weight, or all of these are made first,
    # with the FP8 ones beside them or after.
    fp8_at_load: Literal["in_place", "beside", "after"] = "in_place"
    # Tokens of a context that one block of split attention takes on CDNA, 0 without a workspace.
    attention_partition: int = 0
    graphs: CapturedGraphs | None = None
    estimates_graphs_since: str = ""
    # Windowed layers hold the tokens of a step beside their windows, in blocks of one size.
    pools_blocks: bool = False
    prompt_chunk_tokens: int = 0
    master_weights: bool = True
    keeps_gradients: bool = False
    sequence_parallel: bool = False
    zero_stage: int = 0
    # What an unstated recomputation is: the engine's own default.
    recomputation: Recomputation = "none"
    # Gradients are reduced in buckets; PyTorch's default is 25 MB.
    bucket_bytes: float = 25e6
    bucket_bytes_per_rank: float = 0.0
    gradient_dtype: Dtype | None = None
    adapter_dtype: Dtype = "bf16"
    fp8_kv_cache_with_fp8_weights: bool = False
    fp8_kv_cache_architectures: tuple[str, ...] = ()
    # The file type that stands for a dtype in an engine that loads only such files.
    file_formats: dict[Dtype, str] = Field(default_factory=dict)
    # Widths to which kernels round MXFP4 experts up, by architecture: intermediate, hidden.
    mxfp4_expert_multiples: dict[str, tuple[int, int]] = Field(default_factory=dict)
    gathered_logits: bool = False
    # Whether fine-tuning loads weights in the checkpoint's dtype, and whether fp32 weights are
    # multiplied in 16 bits, where nothing is stated.
    loads_as_stored: bool = False
    autocasts: bool = False
    # What selective recomputation computes again: the attention core (Megatron), or every second
    # matrix product and all between them, without the attention core (torchtitan).
    selective_recomputation: Literal["attention", "every_second_product"] = "attention"
    # Whose casts surround narrow products: kernels fused into their neighbours, or TorchAO's own.
    casts: Literal["fused", "torchao"] = "fused"
    # The share of the last layers whose products stay in 16 bits, by the format of the others.
    wide_tail: dict[str, float] = Field(default_factory=dict)
    # fp32 copies of the logits, their gradient's included, beside those in the operands' dtype; a
    # fused kernel has none in fp32 and writes the gradient in the operands' dtype: 0.5.
    loss_fp32_copies: float = LOSS_FP32_COPIES
    # Logits of which the loss is computed at once; 0: of all.
    loss_chunk_logits: int = 0
    # Chunks of a micro-batch's tokens, one of which has logits at a time; 0: all at once.
    loss_chunks: int = 0
    # Tokens whose logits exist at once, where the loss computes them chunk by chunk from the last
    # hidden states; 0: all.
    loss_chunk_tokens: int = 0
    # Tokens and columns of the vocabulary of one tile of the head's product, where the loss takes
    # log-probabilities tile by tile and computes each again in the backward pass; 0: no tiles.
    logprob_tile: tuple[int, int] = (0, 0)
    # Whether it trains for objectives that compare answers: DPO, KTO, ORPO, reward models.
    compares_answers: bool = False
    # Whether it trains on completions that the model generates itself (GRPO), and whether rows of
    # such a step hold several of them, without padding.
    trains_on_policy: bool = False
    # Whether it trains such completions on the probabilities of a teacher (distillation).
    distils: bool = False
    packs_completions: bool = False
    # Whether new weights reach the generating engine while completions of the old ones go on, so
    # that the next batch starts beside the last completions of the one before.
    updates_in_flight: bool = False
    # What it can leave shared devices while the other works, and the engines it generates with.
    rollout_sleeps: tuple[str, ...] = ("none", "generator", "both")
    rollout_engines: tuple[str, ...] = ("vllm", "sglang", "transformers")
    # Whether all generating devices are one server of the library's own, with a copy each.
    one_rollout_server: bool = False
    lora_targets: Literal["all", "query_value"] = "all"
    wide_norms: bool = False
    unties_embeddings: bool = False
    # Whether adapters drop elements of their inputs, where nothing is stated.
    adapter_dropout: bool = True
    # Packed formats beside which a training's other weights, and so its activations, are fp32.
    fp32_beside_packed: tuple[str, ...] = ()
    loads_before_sharding: bool = False
    grows_cache: bool = False
    prompt_logits: bool = False
    rotary_tables_per_layer: bool = False
    generation_overhead_bytes: float | None = None
    generation_spreads: dict[str, float] = Field(default_factory=dict)
    training_overhead_bytes: float | None = None
    extra_state_bytes: float = 0.0
    update_copies: float = 0.0
    unfilled_ratio: float = 0.0
    # Bytes per trained parameter in host memory beside offloaded optimiser states, by ZeRO stage:
    # gradients, their fp32 copies and staging buffers.
    host_gradient_bytes: dict[str, float] = Field(default_factory=dict)
    # Host memory of offloaded serving weights over their size: pinned allocations and copies.
    host_copy_ratio: float = Field(default=1.0, ge=1)
    narrow_gradients_beside: bool = False
    trains_integers_fused: bool = False
    recomputes_in_slack: bool = False
    counted_by_operator: bool = False
    returns_blocks: bool = False
    activation_ratio: float = 1.0
    quantised_activation_ratio: float = 1.0
    loss_ratio: float = 1.0
    quantised_loss_ratio: float = 1.0
    score_ratio: float = 1.0
    memory_spreads: dict[str, float] = Field(default_factory=dict)
    training_factors: dict[str, dict[str, float]] = Field(default_factory=dict)
    trained_on: tuple[str, ...] = ()
    step_spreads: dict[str, float] = Field(default_factory=dict)
    serving_factors: dict[str, dict[str, float]] = Field(default_factory=dict)
    full_factors: dict[str, dict[str, float]] = Field(default_factory=dict)
    tpot_spreads: dict[str, float] = Field(default_factory=dict)
    ttft_spreads: dict[str, float] = Field(default_factory=dict)
    # Factors of single streams by chip family, by chips of like kernels and by kind of device.
    stream_factors: dict[str, dict[str, float]] = Field(default_factory=dict)
    # Log spreads by chips of like kernels, then pass.
    stream_spreads: dict[str, dict[str, float]] = Field(default_factory=dict)
    # Sources and devices of the fit, by chips of like kernels, then pass and width of weights; and
    # the log spread of passes that one source measured on one device.
    stream_support: dict[str, dict[str, list[int]]] = Field(default_factory=dict)
    lone_stream_spread: float = 0.0
    # Kernels of ggml sum up in 16 bits on cards that halve sums in 32, and compute 16 bits in fp32
    # where its units are faster.
    ggml_kernels: bool = False
    score_bytes: float = 0.0
    computes_on_host: bool = False
    unpack_bytes_per_element: float = 0.0
    working_set_ratio: float = 1.0
    fitted_groups: tuple[str, ...] = ()


ROLE_DEFAULTS: dict[EngineRole, dict[str, Any]] = {
    "runner": {},
    "serving": {
        "layer_overhead_s": 32e-6,
        "request_overhead_s": 4e-6,
        "step_overhead_s": 126e-6,
        "request_latency_s": 15.6e-3,
        "memory_utilisation": 0.9,
        "max_batch_tokens": 8192,
    },
    "training": {"layer_overhead_s": 32e-6},
}


def list_engines() -> tuple[str, ...]:
    """Return the keys of all engines with their own table."""
    return tuple(data_toml("engines.toml")["engines"])


@cache
def engines_by_work(*, training: bool) -> dict[str, str]:
    """Return the titles of the engines that train, or that serve and generate, by key.

    Tools around an engine, and single releases of one, are left out.
    """
    roles = ("runner", "training" if training else "serving")
    return {
        key: table["title"]
        for key, table in data_toml("engines.toml")["engines"].items()
        if table.get("role") in roles and not NUMBER.search(key.partition("_")[2])
    }


PREFERENCE_ENGINE = "trl"  # what trains for an objective that compares answers
AUTO = "auto"  # as the engine of a plan: compare the engines that sites run


def compared_engines(kind: DeviceKind, *, training: bool) -> tuple[str, ...]:
    """Return the engines that ``auto`` compares on a kind of device, the usual one first.

    >>> compared_engines("gpu", training=False), compared_engines("cpu", training=False)
    (('vllm', 'sglang', 'llama_cpp'), ('llama_cpp',))
    """
    lists = data_toml("engines.toml")["auto"]["training" if training else "serving"]
    return tuple(lists.get(kind) or next(iter(lists.values())))


def training_engine(key: str | None, *, compares: bool) -> str | None:
    """Return the engine of a training that names none, or the named one.

    >>> training_engine(None, compares=True), training_engine("torch", compares=True)
    ('trl', 'torch')
    """
    return PREFERENCE_ENGINE if key is None and compares else key


def engines_for(device: DeviceSpec, *, training: bool) -> tuple[str, ...]:
    """Return the engines that ``auto`` compares on a device, the usual one first."""
    return compared_engines("gpu" if device.runs_cuda else device.kind, training=training)


def generic_engines() -> dict[str, EngineRole]:
    """Return the engines without their own table, with their roles."""
    generic = data_toml("engines.toml")["generic"]
    return {key: role for role in ("serving", "training") for key in generic[role]}


def engine_slug(name: str) -> str:
    """Return an engine's name in lower case, with underscores between words.

    >>> engine_slug("TensorRT-LLM")
    'tensorrt_llm'
    """
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


@cache
def _names_by_slug() -> dict[str, str]:
    tables = data_toml("engines.toml")
    names = (*generic_engines(), *tables["engines"], *tables["aliases"])
    return {engine_slug(name): name for name in names}


def engine_name(key: str | None) -> str:
    """Return the catalog name of an engine, or the given name if it is not in the catalog."""
    name = _names_by_slug().get(engine_slug(_without_release(key)), key) if key else None
    aliases: dict[str, str] = data_toml("engines.toml")["aliases"]
    return aliases.get(name or "", name) or DEFAULT_ENGINE


def release_of(key: str | None) -> str:
    """Return the release at the end of an engine's name, if any.

    >>> release_of("SGLang 0.5.9"), release_of("TensorRT-LLM")
    ('0.5.9', '')
    """
    name = _without_release(key) if key else ""
    return (key or "").partition(",")[0].removeprefix(name).strip() if "," not in name else ""


def release_number(release: str) -> tuple[int, ...]:
    """Return the numbers of a release, for comparisons.

    >>> release_number("v0.11.2") > release_number("0.9"), release_number("main")
    (True, ())
    """
    return tuple(int(number) for number in NUMBER.findall(release)[:3])


def _at_release(table: dict[str, Any], release: str) -> dict[str, Any]:
    """Return an engine's table with the changes up to a release; none if it is not known."""
    fields = {name: value for name, value in table.items() if name != "since"}
    changes = table.get("since", {})
    if not release_number(release):
        return fields
    for since in sorted(changes, key=release_number):
        if release_number(since) <= release_number(release):
            fields |= changes[since]
    return fields


def _on_kind(table: dict[str, Any], kind: DeviceKind) -> dict[str, Any]:
    """Return an engine's table with its changes on a kind of device."""
    changes: dict[str, dict[str, Any]] = table.get("on", {})
    return {name: value for name, value in table.items() if name != "on"} | changes.get(kind, {})


def _without_release(key: str) -> str:
    """Return an engine's name without the release after a known name, and without a remark.

    >>> _without_release("transformers 4.49, in-house trainer")
    'transformers'
    """
    key, comma, remark = key.partition(",")
    if comma and engine_slug(remark.strip()) in _names_by_slug():  # two engines are none
        key = f"{key},{remark}"
    name, _, release = key.strip().rpartition(" ")
    names_by_slug = _names_by_slug()
    has_release = (
        release
        and "," not in name
        and engine_slug(key) not in names_by_slug
        and engine_slug(name) in names_by_slug
    )
    return name if has_release else key.strip()


def wrapped_engine(name: str) -> str | None:
    """Return the engine that a tool wraps, or None if it is not such a tool."""
    table = data_toml("engines.toml")["engines"].get(name, {})
    engine: str | None = table.get("harness_of")
    return engine


def _table_of(name: str) -> dict[str, Any] | None:
    """Return an engine's own table; a wrapping tool extends its engine's table."""
    tables = data_toml("engines.toml")["engines"]
    own = dict(tables.get(name, {}))
    wrapped = own.pop("harness_of", None)
    return {**(tables[wrapped] if wrapped else {}), **own} or None


@cache
def get_engine(key: str | None, kind: DeviceKind, *, training: bool = False) -> Engine:
    """Return an engine's figures on a kind of device.

    An engine without its own table is assumed to behave like its role: it has ``is_generic`` set,
    and the estimate adds a warning and widens intervals. The same holds for a serving engine that
    is requested for training.

    Raises:
        BadRequestError: the engine is unknown, and its name is a known one misspelt.
    """
    tables = data_toml("engines.toml")
    name = engine_name(key)
    if name == AUTO:
        raise BadRequestError(
            "engine 'auto' compares the engines of a plan: an estimate is of one engine, so name "
            f"it, such as {compared_engines(kind, training=training)[0]}",
            "engine",
        )
    _refuse_misspelt(name)
    own = _on_kind(_at_release(_table_of(name) or {}, release_of(key)), kind) or None
    if training and own and own["role"] == "serving":
        own = None
    generic_role = generic_engines().get(name, "serving")
    role: EngineRole = own["role"] if own else "training" if training else generic_role
    fitted = fitted_factors(name, kind, role)
    return Engine.model_validate(
        {
            "key": name,
            "title": name,
            "role": role,
            "is_generic": own is None,
            "release": release_of(key),
            **tables["kinds"][kind],
            **ROLE_DEFAULTS[role],
            **(own or {}),
            **fitted,
        }
    )


@cache
def _refuse_misspelt(name: str) -> None:
    """Refuse an unknown engine whose name is so close to a known one that it means it.

    Raises:
        BadRequestError: names the known engine.
    """
    known = _names_by_slug()
    if engine_slug(name) in known:
        return
    close = get_close_matches(engine_slug(name), known, n=1, cutoff=MISSPELT_RATIO)
    if close:
        raise BadRequestError(
            f"engine {name!r} is unknown (nearest: {known[close[0]]}): "
            "only a name unlike all known ones is planned with the figures of any engine",
            "engine",
        )


@cache
def client_of_sweeps() -> Client:
    """Return how the callers of published closed loops send their requests."""
    return Client(**data_toml("engines.toml")["client"])


@cache
def fitted_factors(name: str, kind: DeviceKind, role: EngineRole) -> dict[str, Any]:
    """Return an engine's fitted fields; empty if there are none.

    For device kinds other than GPUs only single streams were published. An engine without
    published runs takes the common factors of its role.
    """
    fitted = data_json("factors.json")["engines"]
    if kind != "gpu":
        return {part: fitted[name][part] for part in STREAM if part in fitted.get(name, {})}
    # An engine with its own table keeps its own overheads: local engines serve one request at a
    # time.
    uses_common = role == "training" or name not in list_engines()
    common = fitted.get(COMMON.get(role, ""), {}) if uses_common else {}
    if role == "runner":  # of whose own training steps on GPUs none are published
        common = {part: fitted[COMMON_TRAINING][part] for part in STEP}
    return {**common, **fitted.get(wrapped_engine(name) or "", {}), **fitted.get(name, {})}


@cache
def routing_evenness() -> float:
    """Return the gamma shape of expert popularity, a measure of routing evenness."""
    return float(data_toml("engines.toml")["routing"]["evenness"])


@cache
def sources() -> dict[str, str]:
    """Return the sources of the figures, by topic."""
    return dict(data_toml("engines.toml")["sources"])


@cache
def calibration_name() -> str:
    """Return the version and digest of the factors in use, as stated in every answer."""
    factor_files = data_text("engines.toml") + data_text("factors.json")
    digest = hashlib.sha256(factor_files.encode()).hexdigest()[:12]
    return f"{data_json('factors.json')['version']}:{digest}"


def calibration_of(host: HostCalibration | None) -> str:
    """Return the version and digest of the factors in use, with the host's own if it has any."""
    return f"{calibration_name()}+{host.host}:{host.digest}" if host else calibration_name()


# Factors of compression methods fitted to published times, read from the factor file.


FILE = "compression_factors.json"
# Spread of methods without a published time, whose duration is uncalibrated.
UNTRIED_SPREAD = 0.8


@cache
def _fitted() -> dict[str, dict[str, Any]]:
    methods: dict[str, dict[str, Any]] = data_json(FILE)["methods"]
    return methods


def published_times(method_group: str) -> int:
    """Return the number of published times for a group of methods."""
    return int(_fitted().get(method_group, {}).get("n", 0))


def factor_of(method_group: str) -> float:
    """Return the calibration factor for the time of a group of methods."""
    return float(_fitted().get(method_group, {}).get("factor", 1.0))


def spread_of(method_group: str) -> float:
    """Return the log spread of a duration, from sources left out of the fit."""
    return float(_fitted().get(method_group, {}).get("spread", UNTRIED_SPREAD))


# ---------------------------------------------------------------------------
# What a release of an engine refuses on a device, and the columns that its kernels take.
# ---------------------------------------------------------------------------


# Float formats that products run in, and the CUDA compute capability from which GPUs have them.
UNITS_FROM: dict[Dtype, float] = {"fp8": 8.9, "nvfp4": 10.0}


class Scope(Spec):
    """Which engines, releases, devices and models a row of ``engine_limits.toml`` is about."""

    engines: frozenset[str]
    weights: frozenset[Dtype] = frozenset()
    model_types: frozenset[str] = frozenset()
    vendors: frozenset[str] = frozenset()
    not_vendors: frozenset[str] = frozenset()
    below: float | None = None
    at_least: float | None = Field(default=None, alias="from")
    since: str = ""
    until: str = ""
    named_release: bool = False
    source: str

    def is_for(self, subject: "Subject") -> bool:
        """Return whether the row is about this engine's release, device and model."""
        vendor, capability = subject.vendor, subject.compute_capability
        return (
            subject.engine in self.engines
            and (not self.model_types or subject.model_type in self.model_types)
            and (not self.vendors or vendor in self.vendors)
            and (not self.not_vendors or (bool(vendor) and vendor not in self.not_vendors))
            and (self.below is None or (capability is not None and capability < self.below))
            and (self.at_least is None or (capability is not None and capability >= self.at_least))
            and (not self.named_release or bool(release_number(subject.release)))
            and in_span(subject.release, self.since, self.until)
        )


class EngineLimit(Scope):
    """A row of ``limit``: formats that an engine refuses, and methods of quantisation."""

    methods: frozenset[str] = frozenset()
    activations: frozenset[Dtype] = frozenset()
    caches: frozenset[Dtype] = frozenset()
    without_peak: Dtype | None = None
    in_blocks: bool = False
    reason: str
    instead: str

    def is_for(self, subject: "Subject") -> bool:
        """Return whether the row is about this engine's release, device and model."""
        return (
            super().is_for(subject)
            and (not self.in_blocks or subject.in_blocks)
            and (not self.without_peak or self.without_peak not in subject.peaks)
        )

    def refuses(self, formats: "Formats") -> str | None:
        """Return the strategy field that the row refuses, None if it allows the formats.

        A row that names no format refuses the engine as a whole.
        """
        refused = (
            ("strategy.weight_dtype", self.weights, formats.weight),
            ("strategy.quantization", self.methods, formats.method),
            ("strategy.activation_dtype", self.activations, formats.activation),
            ("strategy.kv_cache_dtype", self.caches, formats.kv_cache),
        )
        named = [(field, value in values) for field, values, value in refused if values]
        if not all(is_refused for _, is_refused in named):
            return None
        return named[-1][0] if named else "engine"


class Formats(NamedTuple):
    """The formats of a strategy; ``kv_cache`` is None if undecided.

    ``method`` is the method of quantisation of the weights, empty if they have none.
    """

    weight: Dtype
    activation: Dtype
    kv_cache: Dtype | None = None
    method: str = ""


class KernelBlock(Scope):
    """A row of ``kernel_block``: the columns that kernels take of matrices cut by tensor ranks.

    Blocks of the checkpoint are widened to ``least`` columns and narrowed to ``most``; with
    ``pads`` the engine fills every width up. ``title`` names the blocks of the kernel.
    """

    parts: frozenset[WeightPart]
    not_model_types: frozenset[str] = frozenset()
    gated: bool = False
    with_units: Dtype | None = None
    least: int = 1
    most: int | None = None
    pads: bool = False
    title: str = ""

    def is_for(self, subject: "Subject") -> bool:
        """Return whether the row is about this engine's release, device and model."""
        return (
            super().is_for(subject)
            and subject.model_type not in self.not_model_types
            and (not self.gated or subject.gated_mlp)
            and (not self.with_units or self.with_units in subject.units)
        )


class ServingEngine(Spec):
    """A row of ``serving_engine``: what a server can be told, and what its loader insists on.

    ``expert`` says which numbers of ranks the experts may be spread over. ``data`` says when data
    ranks are one server that shares the experts of a sparse model: always, or beside data-parallel
    attention. ``attention_data_takes_all`` leaves no rank to tensor parallelism.
    """

    engine: str
    context: bool = False
    attention_data: bool = False
    attention_data_takes_all: bool = False
    expert: Literal["none", "any", "all_ranks"] = "none"
    data: Literal["separate", "share_experts", "share_experts_beside_attention"] = "separate"
    # A quantised checkpoint starts in the format of its files, whose cuts leave whole blocks.
    starts_as_stored: bool = False
    checks_cuts: bool = False
    # Requests beyond the context of the config are refused at the start.
    bound_to_context: bool = False
    loads_gguf_alone: bool = False
    # Tensor and pipeline ranks exclude each other; models of these types are not cut at all.
    one_split: bool = False
    whole_model_types: frozenset[str] = frozenset()
    source: str


class Subject(NamedTuple):
    """What decides which rows are about an engine on a device with a model."""

    engine: str
    release: str
    vendor: str
    compute_capability: float | None
    peaks: frozenset[Dtype]
    units: frozenset[Dtype]
    model_type: str
    gated_mlp: bool
    in_blocks: bool


def _subject(engine: Engine, device: DeviceSpec, model: ModelSpec) -> Subject:
    return Subject(
        engine.key,
        engine.release,
        (device.vendor or "").lower(),
        device.compute_capability,
        frozenset(device.peak_flops_per_second),
        frozenset(dtype for dtype in UNITS_FROM if has_units(dtype, device)),
        model.model_type,
        model.gated_mlp,
        model.weight_block_size is not None,
    )


@cache
def _limits() -> tuple[EngineLimit, ...]:
    rows: list[dict[str, Any]] = data_toml("engine_limits.toml")["limit"]
    return tuple(EngineLimit.model_validate(row) for row in rows)


@cache
def serving_engines() -> dict[str, ServingEngine]:
    """Return what is known of serving engines, by their keys."""
    rows: list[dict[str, Any]] = data_toml("engine_limits.toml")["serving_engine"]
    return {row["engine"]: ServingEngine.model_validate(row) for row in rows}


@lru_cache(maxsize=64)
def serving_engine(key: str) -> ServingEngine:
    """Return an engine's limits and options; empty ones for an engine without an entry."""
    return serving_engines().get(key) or ServingEngine(engine=key, source="")


@cache
def _kernel_blocks() -> tuple[KernelBlock, ...]:
    rows: list[dict[str, Any]] = data_toml("engine_limits.toml")["kernel_block"]
    return tuple(KernelBlock.model_validate(row) for row in rows)


@lru_cache(maxsize=4096)
def _kernel_blocks_of(subject: Subject) -> tuple[KernelBlock, ...]:
    """Return the rows about a subject; a search asks for the same ones many times."""
    return tuple(block for block in _kernel_blocks() if block.is_for(subject))


def kernel_block(
    engine: Engine,
    device: DeviceSpec,
    model: ModelSpec,
    part: WeightPart,
    weight: Dtype | None,
) -> KernelBlock | None:
    """Return the columns that the kernels of a part take, None if the checkpoint's blocks hold."""
    rows = _kernel_blocks_of(_subject(engine, device, model))
    return next(
        (row for row in rows if part in row.parts and (not row.weights or weight in row.weights)),
        None,
    )


@lru_cache(maxsize=4096)
def _limits_of(subject: Subject) -> tuple[EngineLimit, ...]:
    """Return the rows about a subject; a search asks for the same ones many times."""
    return tuple(limit for limit in _limits() if limit.is_for(subject))


def in_span(release: str, since: str, until: str) -> bool:
    """Return whether a release lies in a span; one without a number lies in every span.

    Releases are compared by as many numbers as the ends of the span have.

    >>> in_span("0.13.0", "", "0.13"), in_span("0.14.1", "", "0.13"), in_span("", "0.31", "")
    (True, False, True)
    """
    known, first, last = map(release_number, (release, since, until))
    if not known:
        return True
    after = not first or known[: len(first)] >= first
    return after and (not last or known[: len(last)] <= last)


class Refusal(NamedTuple):
    """A refusal: the field and what it is, by which engine, why, and a way out."""

    field: str
    name: str
    value: str
    by: str
    reason: str
    instead: str

    @property
    def message(self) -> str:
        """Return the refusal as a sentence."""
        return f"{self.name} is {self.value}, {self.by}: {self.reason}; {self.instead}"


def refusal(
    engine: Engine,
    device: DeviceSpec,
    model: ModelSpec,
    formats: tuple[Dtype, Dtype, Dtype | None],
    quantization: str | None = None,
) -> Refusal | None:
    """Return what an engine refuses of the formats on a device, None if it takes them.

    ``formats`` are those of the weights, the activations and the KV cache, None if undecided.
    ``quantization`` is the one that the request names; a checkpoint has its own, which the field
    ``model`` stands for.
    """
    # Weights in another format than the checkpoint's are quantised anew.
    stored = model.quantization if formats[0] == model.weight_dtype else None
    given = Formats(*formats, (quantization or stored or "").lower().partition(":")[0])
    for limit in _limits_of(_subject(engine, device, model)):
        field = limit.refuses(given)
        if not field:
            continue
        title = engine.title if not engine.release else f"{engine.title} {engine.release}"
        by = f"which {title} refuses on {device.name or device.id}"
        if limit.methods:
            by = f"which {title} does not load"
        if limit.methods and not quantization:
            method = f"stored as {given.method} writes it"
            return Refusal("model", model.id, method, by, limit.reason, limit.instead)
        name = field.rpartition(".")[2]
        values = {
            "weight_dtype": given.weight,
            "activation_dtype": given.activation,
            "kv_cache_dtype": given.kv_cache,
            "quantization": quantization,
        }
        value = str(values.get(name, engine.key))
        return Refusal(field, name, value, by, limit.reason, limit.instead)
    return None


def sixteen_bit_dtype(device: DeviceSpec, published: Dtype | None = None) -> Dtype:
    """Return the 16-bit dtype that engines take on a device: fp16 below compute capability 8.0."""
    capability = device.compute_capability
    if capability is not None and capability < 8.0:  # noqa: PLR2004 - Ampere
        return "fp16"
    return published if published in WIDE and published is not None else "bf16"


def has_units(dtype: Dtype, device: DeviceSpec) -> bool:
    """Return whether a device multiplies a float dtype; True if its units are not known."""
    capability = device.compute_capability
    if capability is None:
        return dtype in device.peak_flops_per_second or not device.peak_flops_per_second
    return capability >= UNITS_FROM[dtype]
