"""Base models, number types, units and errors of every document of the planner."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

# ---------------------------------------------------------------------------
# Base classes of all specs, and other tools' names for choices of a request.
# ---------------------------------------------------------------------------


JsonObject = dict[str, Any]

Dtype = Literal[
    "fp32",
    "tf32",
    "bf16",
    "fp16",
    "fp8",
    "nvfp4",
    "mxfp4",
    "int8",
    "int4",
    "nf4",
    "ternary",
]
# Methods that set single weights to zero and quantise none.
PRUNING_METHODS = frozenset({"magnitude", "wanda", "sparsegpt"})
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
OperatorClass = Literal["compute", "memory_bandwidth", "communication", "overhead", "memory"]


class Spec(BaseModel):
    """An immutable model at an interface; unknown fields are rejected."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_inf_nan="constants", defer_build=True
    )


class SparseSpec(Spec):
    """A spec whose JSON omits absent fields instead of writing null or zero."""

    @model_serializer(mode="wrap")
    def _drop_absent(self, handler: SerializerFunctionWrapHandler) -> JsonObject:
        return {key: value for key, value in handler(self).items() if value is not None}


# Other tools' names for choices of a request, mapped to the planner's names.


DTYPES: dict[str, str] = {
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "mxfp8": "fp8",  # plus block scales: 1/32
}
OPTIMIZERS: dict[str, str] = {
    **dict.fromkeys(
        (
            "adam",
            "adamw_torch",
            "adamw_torch_fused",
            "adamw_hf",
            "adamw_apex_fused",
            "fused_adam",
            "fused_adamw",
            "decoupled_adamw",
            "distributed_adam",
            "distributed_fused_adam",
        ),
        "adamw",
    ),
    **dict.fromkeys(
        ("adam_8bit", "adam8bit", "adamw8bit", "adamw_bnb_8bit", "8bit_adam", "8bit_adamw"),
        "adamw_8bit",
    ),
    "lion_32bit": "lion",
    "momentum": "sgd",
}
ATTENTION: dict[str, str] = {
    **dict.fromkeys(
        (
            "sdpa",
            "xformers",
            "flash2",
            "flash_attention",
            "flash_attention1",
            "flash_attention2",
            "flash_attention_2",
            "flash_attention_3",
            "flash_attn",
            "flash_attn_2",
        ),
        "flash",
    ),
    **dict.fromkeys(("math", "naive", "standard"), "eager"),
    **dict.fromkeys(("flex_attention", "flexattention"), "flex"),
}
SCHEDULES: dict[str, str] = {
    "interleaved_1f1b": "interleaved",
    "1f1b_interleaved": "interleaved",
    "interleaved1f1b": "interleaved",
    "zb": "zero_bubble",
    "zb_h1": "zero_bubble",
    "zbh1": "zero_bubble",
}
RECOMPUTATION: dict[str, str] = {
    "true": "full",
    "uniform": "full",
    "block": "full",
    "false": "none",
    "off": "none",
    "attention": "selective",
}


# Flags of serving engines for their share of the device's memory; each keeps its own meaning.
MEMORY_SHARES = (
    "gpu_memory_utilisation",
    "mem_fraction_static",
    "free_gpu_memory_fraction",
    "kv_cache_free_gpu_memory_fraction",
    "kv_cache_free_gpu_mem_fraction",
    "cache_max_entry_count",
)


def read_memory_share(strategy: object) -> object:
    """Return a strategy with an engine's flag for its share of memory under the common name.

    >>> read_memory_share({"mem-fraction-static": 0.85})
    {'gpu_memory_utilization': 0.85}
    """
    if not isinstance(strategy, dict):
        return strategy
    slugs = {name: str(name).lstrip("-").replace("-", "_").lower() for name in strategy}
    own = "gpu_memory_utilization"
    found = [name for name, slug in slugs.items() if slug == own or slug in MEMORY_SHARES]
    if len(found) != 1:
        return strategy
    return {own if name == found[0] else name: value for name, value in strategy.items()}


def alias_parser(choices: Iterable[str], others: Mapping[str, str]) -> Callable[[object], object]:
    """Return a parser for other tools' names; unknown names pass unchanged.

    >>> alias_parser(("bf16", "fp8"), DTYPES)("BFloat16")
    'bf16'
    """
    own = frozenset(choices)

    def read(value: object) -> object:
        if not isinstance(value, str | bool):
            return value
        slug = re.sub(r"[^a-z0-9]+", "_", str(value).lower()).strip("_")
        return slug if slug in own else others.get(slug, value)

    return read


PLAIN = re.compile(r"(fp32|tf32|fp16|bf16|fp8|int8|int4|nf4|mxfp4|nvfp4|ternary)")
# Dtypes that are also names of quantisations, and are read as quantisations.
BOTH = frozenset({"nf4", "fp8", "nvfp4"})
GGUF = re.compile(r"(?:gguf[ :_-]*)?((?:ud[-_])?i?q\d_\w+)")
BOTH_SIDES = re.compile(r"w\d+a\d+")
REMARK = re.compile(r"\([^()]*\b(?:default|assumed)\b[^()]*\)")
GROUP_SIZE = re.compile(r"\bgroup(?:[ _-]?size)?[ _-]*(\d+)")
BETWEEN = re.compile(r"[^a-z0-9#.]+")
GROUP = re.compile(r"gs?(\d+)")
BITS = re.compile(r"(?:int|uint|w|fp|nf)?(\d+(?:\.\d+)?)(?:bits?|bpw)?")
SAME = {"smoothquant": "w8a8", "llm.int8": "w8a16", "llm.int8()": "w8a16", "none": None}
# The plugin's 4-bit formats without double quantisation, which "-dq" adds.
SAME |= {"bnb.nf4": "bnb.nf4", "bnb.fp4": "bnb.nf4"}
METHODS = {
    "gptq": "gptq",
    "gptqv2": "gptq",
    "awq": "awq",
    "autoawq": "awq",
    "bnb": "bnb",
    "bitsandbytes": "bnb",
    "exl2": "exl2",
    "exl3": "exl3",
    "exllamav2": "exl2",
    "aqlm": "aqlm",
    "quip": "quip",
    "quip#": "quip",
    "vptq": "vptq",
    "spqr": "spqr",
    "hqq": "hqq",
    "higgs": "higgs",
}
# Words that do not affect the size of the weights.
MUTE = frozenset(
    {"act", "actorder", "order", "desc", "sym", "asym", "dq", "double", "quant", "marlin"}
    | {"bit", "bits", "bpw", "weight", "only", "g", "torchao", "quanto", "dynamic"}
)
# Methods with a 16-bit scale and a zero point per group.
GROUPED = frozenset({"gptq", "awq"})
SCALE_BITS = 16.0
DTYPE_BY_BITS = {"4": "int4", "8": "int8"}


def read_quantization(text: str) -> JsonObject:
    """Return the strategy fields that a weight-format name stands for.

    A name that is not fully recognised is returned unchanged and rejected later by name.

    >>> read_quantization("gptq-int4 g128 act-order")
    {'quantization': 'gptq', 'weight_dtype': 'int4', 'group_size': 128}
    >>> read_quantization("exl2 4.25 bpw"), read_quantization("Q4_K_M")
    ({'quantization': 'exl2:4.25'}, {'quantization': 'gguf:q4_k_m'})
    """
    name = REMARK.sub("", text.lower()).strip()
    if name in SAME:
        return {"quantization": SAME[name]}
    packed = GGUF.fullmatch(name)
    if packed:
        return {"quantization": f"gguf:{packed[1].replace('ud_', 'ud-')}"}
    if PLAIN.fullmatch(name) and name not in BOTH:
        return {"weight_dtype": name}
    if not name or ":" in name or name in BOTH:
        return {"quantization": name or None}
    if PLAIN.fullmatch(name.removeprefix("kv-")) and name.startswith("kv-"):
        return {"kv_cache_dtype": name[3:]}
    words = BETWEEN.split(GROUP_SIZE.sub(r"g\1", name.replace("bnb.", "bnb ")))
    return _fields_from_words([word for word in words if word not in MUTE | {""}]) or {
        "quantization": text
    }


def _fields_from_words(words: list[str]) -> JsonObject:
    """Return the fields for the words of a name; empty if a word is unknown."""
    methods = [METHODS[word] for word in words if word in METHODS]
    groups = [match[1] for word in words if (match := GROUP.fullmatch(word))]
    unmatched = [w for w in words if w not in METHODS and not GROUP.fullmatch(w)]
    if len(unmatched) > 1 or len(methods) > 1 or len(groups) > 1:
        return {}
    bits = BITS.fullmatch(unmatched[0]) if unmatched else None
    if unmatched and bits is None:
        return {}
    size: JsonObject = {"group_size": int(groups[0])} if groups else {}
    if methods:
        return _fields_from_method(methods[0], bits[1] if bits else None, size)
    return (
        {"weight_dtype": unmatched[0], **size}
        if unmatched and PLAIN.fullmatch(unmatched[0])
        else {}
    )


def _fields_from_method(method: str, bits: str | None, size: JsonObject) -> JsonObject:
    """Return the fields of a method with the bits and group size of its name."""
    if method == "bnb":
        nf4_fields = {"quantization": "nf4", "weight_dtype": "nf4"}
        return {"weight_dtype": "int8"} if bits == "8" else nf4_fields
    if method not in GROUPED:
        return {"quantization": f"{method}:{bits}"} if bits else {}
    if bits is None or bits in DTYPE_BY_BITS:
        dtype = {"weight_dtype": DTYPE_BY_BITS[bits]} if bits else {}
        return {"quantization": method, **dtype, **size}
    return {"quantization": grouped_format(method, float(bits), size.get("group_size"))}


def grouped_format(
    method: str, bits: float, group: int | None, zero_bits: float | None = None
) -> str:
    """Return the name of a format including the scale and zero-point bits of each group.

    A zero point has as many bits as a weight unless ``zero_bits`` says otherwise.

    >>> grouped_format("gptq", 3, 128)
    'gptq:3.14844'
    """
    zero_bits = bits if zero_bits is None else zero_bits
    metadata = (SCALE_BITS + zero_bits) / group if group and group > 0 else 0.0
    return f"{method}:{bits + metadata:g}"


def read_formats(strategy: object) -> object:
    """Return a strategy with weight-format names resolved; explicit fields take precedence."""
    if not isinstance(strategy, dict):
        return strategy
    fields: JsonObject = {name: value for name, value in strategy.items() if value is not None}
    weight_dtype = fields.get("weight_dtype")
    if isinstance(weight_dtype, str) and "quantization" not in fields and _is_format(weight_dtype):
        fields["quantization"] = fields.pop("weight_dtype")
    named = fields.pop("quantization", None)
    resolved = read_quantization(named) if isinstance(named, str) else {"quantization": named}
    named_fields = {} if resolved == {"quantization": None} else resolved
    return {**named_fields, **_with_compute_dtype(fields, resolved.get("quantization"))}


# Named quantisations that store narrow weights, and those of them that compute in 16 bits.
COMPUTED_IN_16_BITS = frozenset({"gptq", "awq", "nf4", "bnb.nf4", "w4a16", "w8a16"})
STORED_NARROW = COMPUTED_IN_16_BITS | {"w4a8", "w8a8", "fptq", "fp8", "nvfp4"}
WIDE_NAMES = frozenset({"fp32", "fp16", "bf16"})


def _with_compute_dtype(fields: JsonObject, quantization: object) -> JsonObject:
    """Return fields in which a wide dtype beside a quantisation is that of the computation.

    The stored weights are those of the quantisation, as with ``--quantization awq --dtype
    bfloat16`` of vLLM and SGLang, whose dtype is that of activations and unquantised weights:
    https://docs.vllm.ai/en/latest/api/vllm/config/model.html (``ModelConfig.dtype``), and
    ``get_supported_act_dtypes`` of vllm/model_executor/layers/quantization.
    """
    weight = fields.get("weight_dtype")
    slug = weight.lower() if isinstance(weight, str) else ""
    dtype = DTYPES.get(slug, slug)
    is_narrow = isinstance(quantization, str) and quantization in STORED_NARROW
    if not is_narrow or dtype not in WIDE_NAMES:
        return fields
    others = {name: value for name, value in fields.items() if name != "weight_dtype"}
    return {"activation_dtype": dtype, **others} if quantization in COMPUTED_IN_16_BITS else others


def _is_format(name: str) -> bool:
    """Return whether a dtype field holds the name of a format that is not a dtype."""
    slug = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    if PLAIN.fullmatch(slug) or slug in DTYPES:
        return False
    is_recognised = read_quantization(name) != {"quantization": name}
    return (
        is_recognised or ":" in name or name in METHODS or BOTH_SIDES.fullmatch(slug) is not None
    )


# ---------------------------------------------------------------------------
# Errors of requests, each with the field, the value, the limit and the remedy.
#
# Every error has a stable ``code`` for programs, a ``message`` for people and the ``field``
# concerned, and is serialised as one JSON object at the command line and over HTTP.
# ---------------------------------------------------------------------------


class RefusalOfFieldError(ValueError):
    """A value that does not go with another one; ``field`` is its path in the part."""

    def __init__(self, field_name: str, sentence: str) -> None:
        super().__init__(sentence)
        self.field = field_name


def refuse(field_name: str, sentence: str) -> NoReturn:
    """Refuse a value because of another one; the fault names ``field_name``.

    Raises:
        RefusalOfFieldError: always.
    """
    raise RefusalOfFieldError(field_name, sentence)


def location_of(fault: Mapping[str, Any]) -> tuple[int | str, ...]:
    """Return the path of a fault of pydantic's, to the field that a refusal names."""
    raised, location = (fault.get("ctx") or {}).get("error"), tuple(fault["loc"])
    named = tuple(raised.field.split(".")) if isinstance(raised, RefusalOfFieldError) else ()
    return location if location[-len(named) :] == named else (*location, *named)


@dataclass(eq=False)
class PlannerError(Exception):
    """The base class of all planner errors."""

    message: str
    field: str | None = None

    code: ClassVar[str] = "planner_error"

    def __str__(self) -> str:
        return self.message

    def to_json(self) -> dict[str, str | None]:
        """Return the error as the object that the command line and the HTTP API print."""
        return {"code": self.code, "message": self.message, "field": self.field}


class BadRequestError(PlannerError):
    """A field is missing, unknown, of the wrong type or out of its range."""

    code = "bad_request"


@dataclass(eq=False)
class UnknownNameError(PlannerError):
    """A catalog lacks the name; ``nearest`` lists the closest existing names."""

    nearest: tuple[str, ...] = ()

    code = "unknown_name"


class UnknownDeviceError(UnknownNameError):
    """The device catalog has no such id or alias."""

    code = "unknown_device"


class UnknownModelError(UnknownNameError):
    """The model catalog has no such Hugging Face id."""

    code = "unknown_model"


class UnknownInstanceError(UnknownNameError):
    """The catalog of cloud offers has no such id."""

    code = "unknown_instance"


class UnknownTopologyError(UnknownNameError):
    """The catalog of topologies has no such id."""

    code = "unknown_topology"


class UnknownTechniqueError(UnknownNameError):
    """The technique registry has no such key."""

    code = "unknown_technique"


class BadConfigError(PlannerError):
    """A Hugging Face ``config.json`` lacks a field or describes a family that is not covered."""

    code = "bad_config"


class NotPossibleError(PlannerError):
    """The strategy contradicts the model, the cluster or itself, so that it has no cost."""

    code = "not_possible"


class NotCoveredError(PlannerError):
    """The request is valid, but the planner has no formula for it."""

    code = "not_covered"
