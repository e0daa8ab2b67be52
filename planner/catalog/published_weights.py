"""Read from a config in which format a checkpoint stores its weights."""

import re
from fnmatch import fnmatch
from typing import Any

from planner.catalog.config_reader import ConfigReader
from planner.specs.base import Dtype
from planner.specs.model import WeightPart

PLAIN: dict[str, Dtype] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# What quantisation tools call the formats.
FORMATS: dict[str, Dtype] = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "mxfp8": "fp8",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "awq": "int4",
    "gptq": "int4",
    "w4a16": "int4",
    "w4a16_awq": "int4",
    "int4_awq": "int4",
    "w8a8": "int8",
    "int8": "int8",
}
# The dtype of a group of weights by its number type and bits.
BY_BITS: dict[tuple[str, int], Dtype] = {
    ("float", 8): "fp8",
    ("float", 4): "nvfp4",
    ("int", 8): "int8",
    ("int", 4): "int4",
}
# One module of each part that a pattern of skipped modules is tried on.
SAMPLES: dict[WeightPart, tuple[str, ...]] = {
    "attention": (
        "model.layers.N.self_attn.o_proj",
        "model.layers.N.linear_attn.out_proj",
        "model.layers.N.attn.wo_b",
    ),
    "feed_forward": (
        "model.layers.N.mlp.down_proj",
        "model.layers.N.mlp.shared_experts.down_proj",
        "model.layers.N.mlp.shared_expert.down_proj",
        "model.layers.N.ffn.shared_experts.w2",
        "model.layers.N.block_sparse_moe.shared_experts.down_proj",
    ),
    "experts": (
        "model.layers.N.mlp.experts",
        "model.layers.N.ffn.experts",
        "model.layers.N.block_sparse_moe.experts.N.w2",
    ),
}
SKIPPED = ("ignore", "modules_to_not_convert", "exclude_modules")


def read_published_weights(reader: ConfigReader) -> dict[str, Any]:
    """Return dtype, group size and exceptions of the stored weights, as far as the config says."""
    plain = PLAIN.get(str(reader.get("torch_dtype")))
    quant = reader.outer.get("quantization_config") or reader.config.get("quantization_config")
    if not isinstance(quant, dict) or not quant:
        return {"weight_dtype": plain, "quantization": None}
    weights = _group_weights(quant)
    parts = _named_parts(quant)
    bulk = parts.get("experts") or parts.get("feed_forward")
    dtype = bulk or _dtype_of(reader, quant, weights)
    others = parts or _skipped_parts(reader, quant, plain or "bf16")
    return {
        "weight_dtype": dtype or plain,
        "group_size": _group_size(quant, weights),
        "part_dtypes": {part: found for part, found in others.items() if found != dtype},
        "quantization": _method(quant) or None,
    }


def _method(quant: dict[str, Any]) -> str:
    return str(quant.get("quant_algo") or quant.get("quant_method") or "").lower()


def _group_weights(quant: dict[str, Any]) -> dict[str, Any]:
    """Return how a tool with configuration groups describes the weights of the first one."""
    groups = quant.get("config_groups")
    if not isinstance(groups, dict):
        return {}
    first: dict[str, Any] = next(iter(groups.values()), {})
    found = first.get("weights")
    return found if isinstance(found, dict) else {}


def _dtype_of(
    reader: ConfigReader, quant: dict[str, Any], weights: dict[str, Any]
) -> Dtype | None:
    """Return the format of the bulk of the weights: of the experts where there are any."""
    experts = str(quant.get("moe_quant_algo") or "").lower()
    if experts in FORMATS:
        return FORMATS[experts]
    if reader.get("expert_dtype") == "fp4" or "mxfp4" in str(quant.get("format", "")):
        return "mxfp4"
    method, bits = _method(quant), quant.get("bits") or quant.get("w_bit")
    if method in {"gptq", "awq"} and isinstance(bits, int):
        return BY_BITS.get(("int", bits))
    if method in FORMATS:
        return FORMATS[method]
    number, width = str(weights.get("type", "")), weights.get("num_bits")
    return BY_BITS.get((number, width)) if isinstance(width, int) else None


def _group_size(quant: dict[str, Any], weights: dict[str, Any]) -> int | None:
    given = quant.get("group_size") or quant.get("q_group_size") or weights.get("group_size")
    return given if isinstance(given, int) and given > 0 else None


def _named_parts(quant: dict[str, Any]) -> dict[WeightPart, Dtype]:
    """Return the format of each part from a list that gives every module its own."""
    named = quant.get("quantized_layers")
    if not isinstance(named, dict) or _method(quant) != "mixed_precision":
        return {}
    found: dict[WeightPart, Dtype] = {}
    for module, settings in named.items():
        algorithm = str(settings.get("quant_algo", "")).lower().removeprefix("w4a16_")
        for part, samples in SAMPLES.items():
            if algorithm in FORMATS and any(_matches(module, sample) for sample in samples):
                found.setdefault(part, FORMATS[algorithm])
    if quant.get("moe_quant_algo"):
        return {}
    return found


def _skipped_parts(
    reader: ConfigReader, quant: dict[str, Any], plain: Dtype
) -> dict[WeightPart, Dtype]:
    """Return the parts that a checkpoint leaves in a wider format than the rest.

    A part counts when a pattern names it in every layer, or names it in most layers one by one.
    """
    base = FORMATS.get(str(quant.get("quant_method") or "").lower(), plain)
    mixed = bool(quant.get("moe_quant_algo") or reader.get("expert_dtype"))
    left: dict[WeightPart, Dtype] = {}
    if mixed and not quant.get("moe_quant_algo"):
        return {"attention": base, "feed_forward": base}
    patterns = [str(pattern) for name in SKIPPED for pattern in quant.get(name) or ()]
    layers = reader.integer("num_hidden_layers")
    for part in ("attention", "feed_forward"):
        hits = sum(_layers_named(pattern, part, layers) for pattern in patterns)
        if 2 * hits >= layers:
            left[part] = base if mixed else plain
    return left


def _layers_named(pattern: str, part: WeightPart, layers: int) -> int:
    """Return in how many layers a pattern names a part: one, all or none."""
    if not any(_matches(pattern, sample) for sample in SAMPLES[part]):
        return 0
    return 1 if NUMBER.search(pattern) and not pattern.startswith("re:") else layers


def _matches(pattern: str, module: str) -> bool:
    """Return whether a pattern names a module, or one that it is part of."""
    if pattern.startswith("re:"):
        return re.search(pattern[3:], module) is not None
    inner = NUMBER.sub(".N", pattern).rpartition("layers.")[2].strip("*.")
    tail = module.partition("layers.")[2]
    inside = fnmatch(tail, inner) or fnmatch(tail, f"{inner}.*")
    return inside or fnmatch(tail, f"*.{inner}") or fnmatch(tail, f"*.{inner}.*")


# A layer or expert spelt out in a module's path.
NUMBER = re.compile(r"\.\d+(?=[.*]|$)")
