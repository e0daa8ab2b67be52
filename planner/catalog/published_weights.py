"""Read from a config in which format a checkpoint stores its weights."""

import re
from fnmatch import fnmatch
from typing import Any

from planner.catalog.config_reader import ConfigReader
from planner.catalog.quantization_tools import first_known, groups_of, not_read, of_group
from planner.catalog.stored_formats import FIELD, FIXED, Described, StoredFormat, group_of, named
from planner.errors import BadConfigError
from planner.specs.base import Dtype
from planner.specs.model import WeightPart

PLAIN: dict[str, Dtype] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
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
SKIPPED = (
    "ignore",
    "modules_to_not_convert",
    "exclude_modules",
    "llm_int8_skip_modules",
    "skip_modules",
    "linear_weights_not_to_quantize",
    "ignored_layers",
    "exclude",
)
# What names a method where tools disagree: the algorithm before the tool that ran it.
NAMES = ("quant_algo", "quant_method")


def read_published_weights(reader: ConfigReader) -> dict[str, Any]:
    """Return dtype, group size and exceptions of the stored weights, as far as the config says.

    Raises:
        BadConfigError: a field of the description is of the wrong type or out of range.
        NotCoveredError: the weights are stored by a method whose format is not known.
    """
    plain = PLAIN.get(str(reader.get("torch_dtype")))
    quant = _description(reader)
    if not quant:
        return {"weight_dtype": plain, "quantization": None}
    stored = _stored(reader, quant)
    if stored.dtype is None:
        return {"weight_dtype": plain, "quantization": None}
    parts = _named_parts(quant)
    bulk = parts.get("experts") or parts.get("feed_forward")
    dtype = bulk or stored.dtype
    others = parts or _skipped_parts(reader, quant, plain or "bf16")
    return {
        "weight_dtype": dtype,
        "group_size": stored.group_size,
        "part_dtypes": {part: found for part, found in others.items() if found != dtype},
        "quantization": stored.packed or _method(quant) or None,
    }


def _description(reader: ConfigReader) -> Described:
    """Return what the config says of its quantisation; empty where it says nothing."""
    for config in (reader.outer, reader.config):
        for name in ("quantization_config", "compression_config", "quantization"):
            told = config.get(name)
            if told is None or told == {}:
                continue
            if not isinstance(told, dict):
                raise BadConfigError(
                    f"{name} is {told!r}: it must be an object as quantisation tools write it",
                    f"model.{name}",
                )
            inner = told.get("quantization")
            return {**told, **inner} if isinstance(inner, dict) else told
    return {}


def _method(quant: Described) -> str:
    return str(named(quant, *NAMES) or ("mlx" if named(quant, "bits") else "")).lower()


def _stored(reader: ConfigReader, quant: Described) -> StoredFormat:
    """Return the format of the bulk of the weights: of the experts where there are any.

    Raises:
        NotCoveredError: nothing in the description names a format that is known.
    """
    experts = str(quant.get("moe_quant_algo") or "").lower()
    packing = str(quant.get("format") or "")
    if experts in FIXED:
        return StoredFormat(FIXED[experts], group_of(quant))
    if reader.get("expert_dtype") == "fp4":
        return StoredFormat("mxfp4", group_of(quant))
    found = first_known((_method(quant), str(quant.get("quant_method") or "").lower()), quant)
    groups = groups_of(quant)
    if found is None and groups:
        found = of_group(groups[0], packing)
    elif found is not None and groups and found.group_size is None and not found.packed:
        found = StoredFormat(found.dtype, group_of(groups[0]))
    if found is None and quant.get("quantized_layers"):
        found = StoredFormat("bf16")
    if found is None and quant.get("config_groups") == {}:
        found = StoredFormat()
    if found is None:
        raise not_read(_method(quant) or "no quant_method")
    return found


def _named_parts(quant: Described) -> dict[WeightPart, Dtype]:
    """Return the format of each part from a list that gives every module its own."""
    listed = quant.get("quantized_layers")
    if not isinstance(listed, dict) or _method(quant) != "mixed_precision":
        return {}
    found: dict[WeightPart, Dtype] = {}
    for module, settings in listed.items():
        algorithm = str(named(settings, "quant_algo") or "").lower()
        for part, samples in SAMPLES.items():
            if algorithm in FIXED and any(_matches(module, sample) for sample in samples):
                found.setdefault(part, FIXED[algorithm])
    if quant.get("moe_quant_algo"):
        return {}
    return found


def _skipped_parts(
    reader: ConfigReader, quant: Described, plain: Dtype
) -> dict[WeightPart, Dtype]:
    """Return the parts that a checkpoint leaves in a wider format than the rest.

    A part counts when a pattern names it in every layer, or names it in most layers one by one.
    """
    base = FIXED.get(str(quant.get("quant_method") or "").lower(), plain)
    mixed = bool(quant.get("moe_quant_algo") or reader.get("expert_dtype"))
    left: dict[WeightPart, Dtype] = {}
    if mixed and not quant.get("moe_quant_algo"):
        return {"attention": base, "feed_forward": base}
    patterns = _patterns(quant)
    layers = reader.integer("num_hidden_layers")
    for part in ("attention", "feed_forward"):
        hits = sum(_layers_named(pattern, part, layers) for pattern in patterns)
        if 2 * hits >= layers:
            left[part] = base if mixed else plain
    return left


def _patterns(quant: Described) -> list[str]:
    """Return the patterns of modules that keep their own dtype, by every tool's word for them.

    Raises:
        BadConfigError: a list of them is none, or a pattern is no regular expression.
    """
    found: list[str] = []
    for name in SKIPPED:
        told = quant.get(name)
        listed = [told] if isinstance(told, str) else told or []
        if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
            raise BadConfigError(
                f"{name} is {told!r}: it must be a list of module names", f"{FIELD}.{name}"
            )
        found += listed
    found += _kept_whole(quant)
    for pattern in found:
        _refuse_bad(pattern)
    return found


def _kept_whole(quant: Described) -> list[str]:
    """Return the modules that per-module settings leave in 16 bits."""
    dynamic, extra = quant.get("dynamic"), quant.get("extra_config")
    skipped = [f"re:{name[2:]}" for name in dynamic or {} if str(name).startswith("-:")]
    if not isinstance(extra, dict):
        return skipped
    whole = [name for name, own in extra.items() if named(own, "bits") in {16, 32}]
    return skipped + whole


def _refuse_bad(pattern: str) -> None:
    if not pattern.startswith("re:"):
        return
    try:
        re.compile(pattern[3:])
    except re.error as error:
        raise BadConfigError(
            f"{pattern!r} is no regular expression: {error}", f"{FIELD}.ignore"
        ) from error


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
