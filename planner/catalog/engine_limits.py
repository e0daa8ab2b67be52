"""What a release of an engine refuses on a device, and the columns that its kernels take."""

from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

from pydantic import Field

from planner.catalog.engines import Engine, release_number
from planner.catalog.reading import data_toml
from planner.cost.weights import WIDE
from planner.specs.base import Dtype, Spec
from planner.specs.cluster import DeviceSpec
from planner.specs.model import ModelSpec, WeightPart

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
            and _in_span(subject.release, self.since, self.until)
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


def serving_engine(key: str) -> ServingEngine:
    """Return what is known of an engine; of others that it can be told nothing."""
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


def _in_span(release: str, since: str, until: str) -> bool:
    """Return whether a release lies in a span; one without a number lies in every span.

    Releases are compared by as many numbers as the ends of the span have.

    >>> _in_span("0.13.0", "", "0.13"), _in_span("0.14.1", "", "0.13"), _in_span("", "0.31", "")
    (True, False, True)
    """
    known, first, last = map(release_number, (release, since, until))
    if not known:
        return True
    after = not first or known[: len(first)] >= first
    return after and (not last or known[: len(last)] <= last)


def method_of(quantization: str | None, model: ModelSpec, weight: Dtype | None) -> str:
    """Return the method of quantisation of weights: the named one, else the checkpoint's.

    Weights in another format than the checkpoint's are quantised anew.
    """
    stored = model.quantization if weight == model.weight_dtype else None
    return (quantization or stored or "").lower().partition(":")[0]


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
    given = Formats(*formats, method_of(quantization, model, formats[0]))
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
