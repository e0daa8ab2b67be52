"""Read the weight format of a checkpoint from its config."""

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
# Sample modules of each part, to match patterns of skipped modules.
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
# Fields that name the method; the algorithm takes precedence over the tool.
PAIR = 2  # rows and columns
NAMES = ("quant_algo", "quant_method")


def read_published_weights(reader: ConfigReader) -> dict[str, Any]:
    """Return dtype, group size and exceptions of the stored weights, as far as stated.

    Raises:
        BadConfigError: a field of the description is of the wrong type or out of range.
        NotCoveredError: the storage format of the method is unknown.
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
        "group_metadata_bits": stored.group_bits if dtype == stored.dtype else None,
        "weight_block_size": _block_size(quant),
        "part_dtypes": {
            part: part_dtype for part, part_dtype in others.items() if part_dtype != dtype
        },
        "quantization": stored.packed or _method(quant) or None,
    }


def _block_size(quant: Described) -> int | None:
    """Return the width of the blocks that share a scale, None if the checkpoint has none.

    Raises:
        BadConfigError: the field is not a pair of whole numbers.
    """
    name, given = "weight_block_size", quant.get("weight_block_size")
    if given is None:  # compressed-tensors
        blocks = (weights for weights in groups_of(quant) if weights.get("strategy") == "block")
        name, given = "block_structure", next(blocks, {}).get("block_structure")
    if given is None:
        return None
    is_pair = isinstance(given, list) and len(given) == PAIR
    if not is_pair or not all(type(size) is int and size > 0 for size in given):
        raise BadConfigError(
            f"{name} is {given!r}: it must be two whole numbers, as in [128, 128]",
            f"{FIELD}.{name}",
        )
    return int(max(given))


def _description(reader: ConfigReader) -> Described:
    """Return the config's quantisation description; empty if there is none."""
    for config in (reader.outer, reader.config):
        for name in ("quantization_config", "compression_config", "quantization"):
            given = config.get(name)
            if given is None or given == {}:
                continue
            if not isinstance(given, dict):
                raise BadConfigError(
                    f"{name} is {given!r}: it must be an object as quantisation tools write it",
                    f"model.{name}",
                )
            inner = given.get("quantization")
            return {**given, **inner} if isinstance(inner, dict) else given
    return {}


def _method(quant: Described) -> str:
    return str(named(quant, *NAMES) or ("mlx" if named(quant, "bits") else "")).lower()


def _stored(reader: ConfigReader, quant: Described) -> StoredFormat:
    """Return the format of most weights: those of the experts if there are any.

    Raises:
        NotCoveredError: no field of the description names a known format.
    """
    experts = str(quant.get("moe_quant_algo") or "").lower()
    packing = str(quant.get("format") or "")
    if experts in FIXED:
        return StoredFormat(FIXED[experts], group_of(quant))
    if reader.get("expert_dtype") == "fp4":
        return StoredFormat("mxfp4", group_of(quant))
    stored = first_known((_method(quant), str(quant.get("quant_method") or "").lower()), quant)
    groups = groups_of(quant)
    if stored is None and groups:
        stored = of_group(groups[0], packing)
    elif stored is not None and groups and stored.group_size is None and not stored.packed:
        stored = StoredFormat(stored.dtype, group_of(groups[0]))
    if stored is None and quant.get("quantized_layers"):
        stored = StoredFormat("bf16")
    if stored is None and quant.get("config_groups") == {}:
        stored = StoredFormat()
    if stored is None:
        raise not_read(_method(quant) or "no quant_method")
    return stored


def _named_parts(quant: Described) -> dict[WeightPart, Dtype]:
    """Return the format of each part from a list with one entry per module."""
    listed = quant.get("quantized_layers")
    if not isinstance(listed, dict) or _method(quant) != "mixed_precision":
        return {}
    dtype_by_part: dict[WeightPart, Dtype] = {}
    for module, settings in listed.items():
        algorithm = str(named(settings, "quant_algo") or "").lower()
        for part, samples in SAMPLES.items():
            if algorithm in FIXED and any(_matches(module, sample) for sample in samples):
                dtype_by_part.setdefault(part, FIXED[algorithm])
    if quant.get("moe_quant_algo"):
        return {}
    return dtype_by_part


def _skipped_parts(
    reader: ConfigReader, quant: Described, plain: Dtype
) -> dict[WeightPart, Dtype]:
    """Return the parts that a checkpoint stores in a wider format than the rest.

    A part counts if a pattern matches it in every layer, or if patterns match it in most layers.
    """
    base = FIXED.get(str(quant.get("quant_method") or "").lower(), plain)
    mixed = bool(quant.get("moe_quant_algo") or reader.get("expert_dtype"))
    wider: dict[WeightPart, Dtype] = {}
    if mixed and not quant.get("moe_quant_algo"):
        return {"attention": base, "feed_forward": base}
    patterns = _patterns(quant)
    layers = reader.integer("num_hidden_layers")
    for part in ("attention", "feed_forward"):
        hits = sum(_layers_named(pattern, part, layers) for pattern in patterns)
        if 2 * hits >= layers:
            wider[part] = base if mixed else plain
    return wider


def _patterns(quant: Described) -> list[str]:
    """Return the patterns of modules with their own dtype, from the fields of all tools.

    Raises:
        BadConfigError: a field is not a list of names, or a pattern is not a regular expression.
    """
    patterns: list[str] = []
    for name in SKIPPED:
        listed_value = quant.get(name)
        listed = [listed_value] if isinstance(listed_value, str) else listed_value or []
        if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
            raise BadConfigError(
                f"{name} is {listed_value!r}: it must be a list of module names", f"{FIELD}.{name}"
            )
        patterns += listed
    patterns += _full_precision_modules(quant)
    for pattern in patterns:
        _validate_pattern(pattern)
    return patterns


def _full_precision_modules(quant: Described) -> list[str]:
    """Return the modules that per-module settings keep in 16 or 32 bits."""
    dynamic, extra = quant.get("dynamic"), quant.get("extra_config")
    skipped = [f"re:{name[2:]}" for name in dynamic or {} if str(name).startswith("-:")]
    if not isinstance(extra, dict):
        return skipped
    full_precision = [name for name, own in extra.items() if named(own, "bits") in {16, 32}]
    return skipped + full_precision


def _validate_pattern(pattern: str) -> None:
    if not pattern.startswith("re:"):
        return
    try:
        re.compile(pattern[3:])
    except re.error as error:
        raise BadConfigError(
            f"{pattern!r} is no regular expression: {error}", f"{FIELD}.ignore"
        ) from error


def _layers_named(pattern: str, part: WeightPart, layers: int) -> int:
    """Return the number of layers in which a pattern names a part: one, all or none."""
    if not any(_matches(pattern, sample) for sample in SAMPLES[part]):
        return 0
    return 1 if NUMBER.search(pattern) and not pattern.startswith("re:") else layers


def _matches(pattern: str, module: str) -> bool:
    """Return whether a pattern matches a module or one that contains it."""
    if pattern.startswith("re:"):
        return re.search(pattern[3:], module) is not None
    inner = NUMBER.sub(".N", pattern).rpartition("layers.")[2].strip("*.")
    tail = module.partition("layers.")[2]
    inside = fnmatch(tail, inner) or fnmatch(tail, f"{inner}.*")
    return inside or fnmatch(tail, f"*.{inner}") or fnmatch(tail, f"*.{inner}.*")


# A layer or expert number in a module path.
NUMBER = re.compile(r"\.\d+(?=[.*]|$)")
