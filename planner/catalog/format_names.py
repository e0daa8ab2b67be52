"""Formats of stored weights, from a config's fields or a checkpoint's name."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from planner.catalog.gguf import MOST_BITS, PLAIN_BITS, PackedFormat
from planner.catalog.layer_groups import TEXT_PARTS
from planner.specs.base import SCALE_BITS, BadConfigError, Dtype, grouped_format
from planner.specs.model import ModelSpec

# Formats of stored weights, from bits, groups and algorithm names in a config.


FIELD = "model.quantization_config"
QuantizationConfig = dict[str, Any]


@dataclass(frozen=True)
class StoredFormat:
    """The format of most stored weights; None if they are unquantised.

    ``packed`` names formats without a dtype by method and mean bits. ``group_bits`` are those of a
    group's scale and zero point, None for the dtype's usual ones.
    """

    dtype: Dtype | None = None
    group_size: int | None = None
    packed: str | None = None
    group_bits: float | None = None


FLOATS: dict[str, Dtype] = {
    "fp8": "fp8",
    "float8": "fp8",
    "mxfp8": "fp8",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "int8": "int8",
    "int4": "int4",
}
# Methods and algorithms with a fixed format.
FIXED: dict[str, Dtype] = {
    **FLOATS,
    "fbgemm_fp8": "fp8",
    "deepspeedfp": "fp8",
    "modelopt_fp8": "fp8",
    "w8a8_fp8": "fp8",
    "fp8_pb_wo": "fp8",
    "fp8_per_channel_per_token": "fp8",
    "modelopt_fp4": "nvfp4",
    "petit_nvfp4": "nvfp4",
    "nvfp4_awq": "nvfp4",
    "w4a16_nvfp4": "nvfp4",
    "gpt_oss_mxfp4": "mxfp4",
    "w4a16_mxfp4": "mxfp4",
    "w4a16": "int4",
    "w4a16_awq": "int4",
    "w4a8_awq": "int4",
    "int4_awq": "int4",
    "qqq": "int4",
    "eetq": "int8",
    "w8a16": "int8",
    "w8a8": "int8",
    "w8a8_int8": "int8",
    "w8a8_sq_per_channel": "int8",
    "w8a8_sq_per_channel_per_token_plugin": "int8",
    "experts_int8": "int8",
    "smoothquant": "int8",
}
INTEGERS: dict[float, Dtype] = {4: "int4", 8: "int8"}
FEWEST_BITS = 1
DEFAULT_BITS = 4
GROUP_NAMES = ("group_size", "q_group_size", "groupsize")
BIT_NAMES = ("bits", "nbits", "w_bit", "wbits", "num_bits")


def first_field(value: object, *names: str) -> object:
    """Return the first present field of a description, or None."""
    description = value if isinstance(value, dict) else {}
    return next((description[name] for name in names if description.get(name) is not None), None)


def number_of(value: object, field: str) -> float:
    """Return a number, also from text.

    Raises:
        BadConfigError: the value is not a number.
    """
    text = value if isinstance(value, str) else None
    number = float(text) if text and re.fullmatch(r"-?\d+(\.\d+)?", text.strip()) else value
    if (
        isinstance(number, bool)
        or not isinstance(number, int | float)
        or not math.isfinite(number)
    ):
        raise BadConfigError(f"{field} is {value!r}: it must be a number", f"{FIELD}.{field}")
    return number


def group_of(*descriptions: object, default: int | None = None) -> int | None:
    """Return the number of weights per scale; None for one scale per channel or tensor.

    Raises:
        BadConfigError: the group size is not a number.
    """
    stated = [
        description[name]
        for description in descriptions
        if isinstance(description, dict)
        for name in GROUP_NAMES
        if name in description
    ]
    given = stated[0] if stated else default
    if given is None:
        return None
    size = number_of(given, "group_size")
    return int(size) if size > 0 else None


def bits_of(*descriptions: object, default: float = DEFAULT_BITS) -> float:
    """Return the bits per weight, without scales.

    Raises:
        BadConfigError: the value is not a valid number of bits.
    """
    stated = (
        (name, bits_field)
        for description in descriptions
        for name in BIT_NAMES
        if (bits_field := first_field(description, name)) is not None
    )
    name, given = next(stated, ("bits", default))
    bits = number_of(given, name)
    if not FEWEST_BITS <= bits <= MOST_BITS:
        raise BadConfigError(
            f"{name} is {bits:g}: a weight has 1 to {MOST_BITS:g} of them", f"{FIELD}.{name}"
        )
    return bits


def integers(
    method: str, bits: float, group: int | None, zero_bits: float | None = None
) -> StoredFormat:
    """Return an integer format with a 16-bit scale and a zero point per group.

    ``zero_bits`` are those of the zero point, None for the usual ones of the dtype.
    """
    if bits >= PLAIN_BITS:
        return StoredFormat()
    dtype = INTEGERS.get(bits)
    if dtype == "int8" or (dtype and group):
        metadata = None if zero_bits is None or not group else SCALE_BITS + zero_bits
        return StoredFormat(dtype, group, group_bits=metadata)
    return packed_format(grouped_format(method, bits, group, zero_bits), bits)


def packed_format(name: str, bits: float) -> StoredFormat:
    """Return a format of given mean bits, with its nearest dtype."""
    return StoredFormat(PackedFormat(bits, PLAIN_BITS, PLAIN_BITS).nominal, None, name)


def of_bits(method: str, bits: float) -> StoredFormat:
    """Return a packed format with the mean bits that a method's fields imply.

    Raises:
        BadConfigError: the bits are out of range.
    """
    if not 0 < bits <= PLAIN_BITS:
        raise BadConfigError(
            f"quantization_config of {method} implies {bits:g} bits a weight: it must be more "
            f"than 0 and at most {PLAIN_BITS:g}",
            FIELD,
        )
    return packed_format(f"{method}:{bits:g}", bits)


__all__ = ["StatedFormat", "names_gguf", "split_format", "with_format"]

SEPARATOR = r"[-_.\s]"
BLOCK = [128, 128]
MLX_BITS, MLX_NARROW = (3, 4, 5, 6, 8), (3, 4, 5)
PLAIN_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
# Fields of a config that describe how its weights are stored.
DESCRIPTIONS = ("quantization_config", "compression_config", "quantization", "expert_dtype")
SELF_ATTENTION = ("*.self_attn*",)
HYBRID_ATTENTION = ("*.self_attn*", "*.linear_attn*")
SHARED_EXPERTS = ("*.mlp.shared_expert*",)
# Modules that 4-bit checkpoints leave in 16 bits, by model_type, as in the catalog's own configs.
LEFT_ALONE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "kimi_k2"), SELF_ATTENTION),
    **dict.fromkeys(("minimax_m2", "minimax_m3", "minimax_m3_vl"), SELF_ATTENTION),
    **dict.fromkeys(("gemma4_text", "glm4_moe", "gpt_oss"), SELF_ATTENTION),
    "deepseek_v4": ("*.attn.*", "*.ffn.shared_experts.*"),
    "glm_moe_dsa": (*SELF_ATTENTION, *SHARED_EXPERTS),
    "qwen3_5_text": HYBRID_ATTENTION,
    "qwen3_5_moe_text": (*HYBRID_ATTENTION, *SHARED_EXPERTS),
    "qwen3_next": (*HYBRID_ATTENTION, *SHARED_EXPERTS),
}
# Besides these, of models with experts.
LEFT_ALONE_BESIDE_EXPERTS = {"gemma4_text": ("*.mlp*",)}


@dataclass(frozen=True)
class Style:
    """How a tool describes a format in a config; without a description the weights are plain."""

    title: str
    detail: str
    dtype: Dtype
    description: QuantizationConfig | None = None
    leaves_modules: bool = False


@dataclass(frozen=True)
class StatedFormat:
    """A format as a name states it; ``is_publishers`` if the owner's own way of it is known."""

    key: str
    is_publishers: bool = False
    is_generic: bool = False

    @property
    def style(self) -> Style:
        """Return the description of the format."""
        return STYLES[self.key]

    @property
    def is_plain(self) -> bool:
        """Return whether the weights are not quantised."""
        return self.style.description is None


def _compressed(packing: str, kind: str, bits: int, **weights: object) -> QuantizationConfig:
    """Return a description as llm-compressor writes it."""
    return {
        "quant_method": "compressed-tensors",
        "format": packing,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"type": kind, "num_bits": bits, **weights},
            }
        },
        "ignore": ["lm_head"],
    }


def _quark(dtype: str, **weights: object) -> QuantizationConfig:
    weight = {"dtype": dtype, **weights}
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}}


def _mlx(bits: int) -> Style:
    return Style(
        f"{bits}-bit MLX",
        "in groups of 64",
        "int4" if bits in MLX_NARROW else "int8",
        {"group_size": 64, "bits": bits},
    )


def _int4(method: str, group: int, description: QuantizationConfig) -> Style:
    return Style(method, f"in groups of {group}", "int4", description)


GPTQ = {"quant_method": "gptq", "group_size": 128, "desc_act": False, "sym": True}
STYLES: dict[str, Style] = {
    "bf16": Style("BF16", "unquantised", "bf16"),
    "fp16": Style("FP16", "unquantised", "fp16"),
    "fp8 blocks": Style(
        "FP8",
        "with a scale per block of 128 x 128",
        "fp8",
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": BLOCK,
        },
    ),
    "fp8 tensors": Style(
        "FP8",
        "with a scale per tensor",
        "fp8",
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "fp8 modelopt": Style(
        "FP8", "with a scale per tensor", "fp8", {"quant_method": "modelopt", "quant_algo": "FP8"}
    ),
    "fp8 quark": Style("FP8", "with a scale per tensor", "fp8", _quark("fp8_e4m3")),
    "fp8 fbgemm": Style(
        "FP8",
        "with a scale per channel and attention in 16 bits",
        "fp8",
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": [*SELF_ATTENTION]},
    ),
    "fp8 compressed tensors": Style(
        "FP8",
        "with a scale per tensor",
        "fp8",
        _compressed("float-quantized", "float", 8, strategy="tensor"),
    ),
    "fp8 compressed channels": Style(
        "FP8",
        "with a scale per channel",
        "fp8",
        _compressed("float-quantized", "float", 8, strategy="channel"),
    ),
    "fp8 compressed blocks": Style(
        "FP8",
        "with a scale per block of 128 x 128",
        "fp8",
        _compressed("float-quantized", "float", 8, strategy="block", block_structure=BLOCK),
    ),
    "mxfp8": Style("MXFP8", "in groups of 32", "fp8", {"quant_method": "mxfp8"}),
    "nvfp4": Style(
        "NVFP4",
        "in groups of 16",
        "nvfp4",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        leaves_modules=True,
    ),
    "nvfp4 compressed": Style(
        "NVFP4",
        "in groups of 16",
        "nvfp4",
        _compressed("nvfp4-pack-quantized", "float", 4, strategy="tensor_group", group_size=16),
        leaves_modules=True,
    ),
    "mxfp4": Style(
        "MXFP4", "in groups of 32", "mxfp4", {"quant_method": "mxfp4"}, leaves_modules=True
    ),
    "mxfp4 quark": Style(
        "MXFP4", "in groups of 32", "mxfp4", _quark("fp4", group_size=32), leaves_modules=True
    ),
    "awq": _int4(
        "AWQ",
        128,
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    ),
    "awq compressed": _int4(
        "AWQ",
        32,
        _compressed("pack-quantized", "int", 4, strategy="group", group_size=32),
    ),
    "awq int8": Style(
        "AWQ in 8 bits",
        "in groups of 32",
        "int8",
        _compressed("pack-quantized", "int", 8, strategy="group", group_size=32),
    ),
    "gptq int4": Style(
        "GPTQ", "in groups of 128", "int4", {**GPTQ, "bits": 4}, leaves_modules=True
    ),
    "gptq int8": Style(
        "GPTQ in 8 bits", "in groups of 128", "int8", {**GPTQ, "bits": 8}, leaves_modules=True
    ),
    "w4a16": _int4(
        "INT4",
        128,
        _compressed("pack-quantized", "int", 4, strategy="group", group_size=128),
    ),
    "auto-round": _int4("INT4", 128, {"quant_method": "auto-round", "bits": 4, "group_size": 128}),
    "w8a16": Style(
        "INT8",
        "with a scale per channel",
        "int8",
        _compressed("pack-quantized", "int", 8, strategy="channel"),
    ),
    "w8a8": Style(
        "INT8",
        "with a scale per channel",
        "int8",
        _compressed("int-quantized", "int", 8, strategy="channel"),
    ),
    "bnb 4bit": Style(
        "NF4",
        "of bitsandbytes with double quantisation",
        "nf4",
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        },
    ),
    "bnb 8bit": Style(
        "INT8", "of bitsandbytes", "int8", {"quant_method": "bitsandbytes", "load_in_8bit": True}
    ),
    **{f"mlx {bits}": _mlx(bits) for bits in MLX_BITS},
}
# Words at the end of a name; "-" stands for any separator.
WORDS: dict[str, str] = {
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8": "fp8 blocks",
    "fp8-block": "fp8 compressed blocks",
    "fp8-dynamic": "fp8 compressed channels",
    "fp8-static": "fp8 compressed tensors",
    "fp8-static-pertensor": "fp8 modelopt",
    "fp8-kv": "fp8 quark",
    "mxfp8": "mxfp8",
    **dict.fromkeys(("nvfp4", "nvfp4-v2", "nvfp4-w4a4", "fp4", "fp4-v2"), "nvfp4"),
    "nvfp4a16": "nvfp4 compressed",
    "mxfp4": "mxfp4",
    "w-mxfp4-a-fp8": "mxfp4 quark",
    **dict.fromkeys(("awq", "awq-4bit", "awq-int4", "awq-w4a16", "int4-awq"), "awq"),
    **dict.fromkeys(("awq-8bit", "awq-int8"), "awq int8"),
    **dict.fromkeys(("gptq", "gptq-int4", "gptq-4bit"), "gptq int4"),
    **dict.fromkeys(("gptq-int8", "gptq-8bit"), "gptq int8"),
    **dict.fromkeys(("int4", "w4a16", "quantized-w4a16", "w4a16-g128"), "w4a16"),
    "int4-autoround": "auto-round",
    **dict.fromkeys(("w8a16", "quantized-w8a16"), "w8a16"),
    **dict.fromkeys(("int8", "w8a8", "quantized-w8a8"), "w8a8"),
    **dict.fromkeys(("bnb-4bit", "unsloth-bnb-4bit", "bnb-nf4"), "bnb 4bit"),
    "bnb-8bit": "bnb 8bit",
    **{f"{prefix}{bits}bit": f"mlx {bits}" for bits in MLX_BITS for prefix in ("", "mlx-")},
    "4bit-dwq": "mlx 4",
    "mlx-bf16": "bf16",
}
# Words that leave the scheme open: a model that is stored in their format keeps its own config.
GENERIC = frozenset({"bf16", "fp8", "mxfp8", "mxfp4", "nvfp4", "fp4", "int4", "int8"})
RED_HAT = {
    "fp8": "fp8 compressed tensors",
    "nvfp4": "nvfp4 compressed",
    "fp4": "nvfp4 compressed",
}
# How publishers differ from the usual meaning of a word.
BY_OWNER: dict[str, Mapping[str, str]] = {
    "nvidia": {"fp8": "fp8 modelopt"},
    "redhatai": RED_HAT,
    "neuralmagic": RED_HAT,
    "nm-testing": RED_HAT,
    "amd": {"fp8": "fp8 quark", "mxfp4": "mxfp4 quark"},
    "meta-llama": {"fp8": "fp8 fbgemm"},
    "mistralai": {"fp8": "fp8 tensors", "nvfp4": "nvfp4 compressed"},
    "cpatonn": {"awq-4bit": "awq compressed"},
    "cyankiwi": {"awq-4bit": "awq compressed"},
}
# Families whose publisher stores FP8 in another way than in blocks, by the start of a name.
BY_MODEL: dict[tuple[str, str], Mapping[str, str]] = {
    ("zai-org", "glm-4"): {"fp8": "fp8 compressed channels"},
    ("tencent", "hunyuan-"): {"fp8": "fp8 tensors"},
    ("tencent", "hy3"): {"fp8": "fp8 tensors"},
}
GGUF = re.compile(r"^(?P<rest>.+?)[-_.](i1[-_.])?gguf(:\S+)?$", re.IGNORECASE)


@cache
def _pattern() -> re.Pattern[str]:
    """Return the pattern of a name that ends in words of a format, the most of them."""
    words = "|".join(re.escape(word).replace(r"\-", SEPARATOR) for word in WORDS)
    return re.compile(rf"^(?P<rest>.+?){SEPARATOR}(?P<words>{words})$", re.IGNORECASE)


def split_format(name: str) -> tuple[str, StatedFormat] | None:
    """Return a name without its format and the format, or None if it states none.

    >>> split_format("nvidia/Llama-3.3-70B-Instruct-FP8")[0]
    'nvidia/Llama-3.3-70B-Instruct'
    """
    match = _pattern().match(name.strip())
    if match is None:
        return None
    rest, word = match["rest"], re.sub(SEPARATOR, "-", match["words"].lower())
    owner, _, own_name = rest.lower().rpartition("/")
    by_model = next(
        (
            ways
            for (publisher, start), ways in BY_MODEL.items()
            if owner == publisher and own_name.startswith(start)
        ),
        {},
    )
    own = by_model.get(word) or BY_OWNER.get(owner, {}).get(word)
    stated = StatedFormat(
        key=own or WORDS[word], is_publishers=bool(own), is_generic=not own and word in GENERIC
    )
    return rest, stated


def names_gguf(name: str) -> str | None:
    """Return the model of a repository of GGUF files by its name, None for other names.

    >>> names_gguf("unsloth/Qwen3-8B-GGUF")
    'unsloth/Qwen3-8B'
    """
    match = GGUF.match(name.strip())
    return match["rest"] if match else None


def with_format(
    config: Mapping[str, Any], model: ModelSpec, stated: StatedFormat
) -> QuantizationConfig:
    """Return a model's config with the description of a stated format in place of its own."""
    replaced = _without_description(config)
    parts = [replaced]
    for name in TEXT_PARTS:
        if isinstance(replaced.get(name), dict):
            replaced[name] = _without_description(replaced[name])
            parts.append(replaced[name])
    if stated.style.description is None:
        for part in parts:
            part.pop("dtype", None)
            part["torch_dtype"] = PLAIN_DTYPES[stated.style.dtype]
        return replaced
    description = {**stated.style.description}
    description["ignore"] = [*description.get("ignore", ()), *left_alone(model, stated)]
    return {**replaced, "quantization_config": description}


def left_alone(model: ModelSpec, stated: StatedFormat) -> tuple[str, ...]:
    """Return the modules that checkpoints of a stated format leave in 16 bits."""
    if not stated.style.leaves_modules:
        return ()
    beside = LEFT_ALONE_BESIDE_EXPERTS if model.is_moe else {}
    return (*LEFT_ALONE.get(model.model_type, ()), *beside.get(model.model_type, ()))


def _without_description(config: Mapping[str, Any]) -> QuantizationConfig:
    return {name: value for name, value in config.items() if name not in DESCRIPTIONS}
