"""Reads the weight format of a checkpoint from its config, by each quantisation tool's fields."""

import math
import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from typing import Any

from planner.catalog.format_names import (
    DEFAULT_BITS,
    FIELD,
    FIXED,
    FLOATS,
    QuantizationConfig,
    StoredFormat,
    bits_of,
    first_field,
    group_of,
    integers,
    number_of,
    of_bits,
)
from planner.catalog.layer_groups import ConfigReader
from planner.cost.weights import DEFAULT_GROUP
from planner.specs.base import BadConfigError, Dtype, NotCoveredError
from planner.specs.model import WeightPart

# Read the weight format from the config fields of each quantisation tool.
#
# Source of the fields and their defaults: transformers 5, utils/quantization_config.py; AutoGPTQ,
# AutoAWQ, ModelOpt and vLLM use the same names.


FLOATS_BY_BITS: dict[float, Dtype] = {4: "nvfp4", 8: "fp8"}
NF4_BLOCK = 64
NF4_SCALE_BITS = 32.0  # one fp32 maximum per block, without double quantisation
# SpQR, Dettmers et al. 2023, arXiv:2306.03078, section 3: 3-bit statistics per group, quantised
# again in groups of groups, and about one weight in a hundred stored whole with its position.
SPQR_STATISTICS_BITS, SPQR_SECOND_LEVEL_BITS, SPQR_OUTLIER_BITS = 6.0, 64.0, 0.32


def _integers(
    method: str, group: int | None = None
) -> Callable[[QuantizationConfig], StoredFormat]:
    def read(quant: QuantizationConfig) -> StoredFormat:
        return integers(method, bits_of(quant), group_of(quant, default=group))

    return read


def _packed_zeros(method: str) -> Callable[[QuantizationConfig], StoredFormat]:
    """Return a reader for methods that store ``qzeros`` in the width of the weights.

    GPTQ and AWQ allocate them whether or not the groups are symmetric (AutoGPTQ,
    nn_modules/qlinear/qlinear_cuda.py; AutoAWQ, awq/modules/linear/gemm.py).
    """

    def read(quant: QuantizationConfig) -> StoredFormat:
        bits = bits_of(quant)
        return integers(method, bits, group_of(quant, default=128), bits)

    return read


def _bitsandbytes(quant: QuantizationConfig) -> StoredFormat:
    """Return bitsandbytes' storage format: NF4 or FP4 in blocks of 64, or 8-bit integers."""
    if quant.get("load_in_4bit") or quant.get("_load_in_4bit"):
        if quant.get("bnb_4bit_use_double_quant"):
            return StoredFormat("nf4", NF4_BLOCK)
        return StoredFormat("nf4", None, f"nf4:{4 + NF4_SCALE_BITS / NF4_BLOCK:g}")
    eight = quant.get("load_in_8bit") or quant.get("_load_in_8bit")
    return StoredFormat("int8") if eight else StoredFormat()


def _hqq(quant: QuantizationConfig) -> StoredFormat:
    """Return HQQ's storage format: n-bit integers with a 16-bit scale and zero point per group."""
    outer = quant.get("quant_config")
    parameters = first_field(outer, "weight_quant_params") or outer or quant
    return integers("hqq", bits_of(parameters, quant), group_of(parameters, quant, default=64))


def _aqlm(quant: QuantizationConfig) -> StoredFormat:
    """Return AQLM's storage format: codebook indices; a whole matrix shares the codebooks."""
    fields = {
        name: number_of(quant.get(name, default), name)
        for name, default in (
            ("num_codebooks", 1),
            ("nbits_per_codebook", 16),
            ("in_group_size", 8),
            ("out_group_size", 1),
        )
    }
    weights = fields["in_group_size"] * fields["out_group_size"]
    if weights <= 0:
        raise BadConfigError(
            f"in_group_size times out_group_size is {weights:g}: it must be at least 1",
            f"{FIELD}.in_group_size",
        )
    return of_bits("aqlm", fields["num_codebooks"] * fields["nbits_per_codebook"] / weights)


def _vptq(quant: QuantizationConfig) -> StoredFormat:
    """Return VPTQ's storage format: indices of vectors in a codebook and a residual codebook."""
    shared, per_layer = quant.get("shared_layer_config"), quant.get("config_for_layers")
    layers = [
        layer
        for group in (per_layer, shared)
        if isinstance(group, dict)
        for layer in group.values()
        if isinstance(layer, dict)
    ]
    bits = [_vptq_bits(layer) for layer in layers if layer.get("num_centroids")]
    if not bits:
        raise BadConfigError(
            "quantization_config of vptq has no layer with num_centroids: give it for each layer",
            f"{FIELD}.config_for_layers",
        )
    return of_bits("vptq", sum(bits) / len(bits))


def _vptq_bits(layer: QuantizationConfig) -> float:
    length = _largest(layer.get("vector_lens"), "vector_lens")
    codes = _largest(layer.get("num_centroids"), "num_centroids")
    residual_codes = _largest(layer.get("num_res_centroids", [-1]), "num_res_centroids")
    if length < 1:
        raise BadConfigError(
            f"vector_lens is {length:g}: it must be at least 1", f"{FIELD}.vector_lens"
        )
    return (math.log2(max(codes, 1)) + math.log2(max(residual_codes, 1))) / length


def _largest(values: object, field: str) -> float:
    listed = values if isinstance(values, list) and values else [values]
    return max(number_of(value, field) for value in listed)


def _named_dtype(method: str, *fields: str) -> Callable[[QuantizationConfig], StoredFormat]:
    """Return a reader for methods with a dtype field: qint4, float8_e4m3fn, nvfp4."""

    def read(quant: QuantizationConfig) -> StoredFormat:
        word = str(first_field(quant, *fields) or "").lower()
        return format_of_dtype_name(method, word, group_of(quant))

    return read


def format_of_dtype_name(method: str, dtype_name: str, group: int | None) -> StoredFormat:
    """Return the storage format of a dtype name in a config, such as ``float8_e4m3fn``.

    Raises:
        NotCoveredError: the name is not of a known dtype.
    """
    floats = next((dtype for name, dtype in FLOATS.items() if name in dtype_name), None)
    if floats is None and re.search(r"fp8|f8|float8", dtype_name):
        floats = "fp8"
    integer_match = re.search(r"u?int(\d)", dtype_name)
    if floats and floats not in {"int4", "int8"}:
        return StoredFormat(floats)
    if integer_match:
        return integers(method, float(integer_match[1]), group)
    if dtype_name in {"fp4", "float4"}:
        return StoredFormat("mxfp4" if group == DEFAULT_GROUP["mxfp4"] else "nvfp4")
    raise not_read(f"{method} {dtype_name}".strip())


def _torchao(quant: QuantizationConfig) -> StoredFormat:
    """Return the format of a torchao configuration, given as an object or a short name."""
    kind: object = quant.get("quant_type")
    if isinstance(kind, dict):
        inner = kind.get("default", kind)
        group_holder = inner.get("_data") if isinstance(inner, dict) else None
        word = str(first_field(inner, "_type") or "").lower()
        return format_of_dtype_name(
            "torchao", word, group_of(group_holder, default=_torchao_group(word))
        )
    word, extra = str(kind or "").lower(), quant.get("quant_type_kwargs")
    return format_of_dtype_name(
        "torchao", word, group_of(quant, extra, default=_torchao_group(word))
    )


def _torchao_group(word: str) -> int | None:
    """Return the default group of 4 bits; 8 bits have one scale per channel."""
    return 128 if "int4" in word else None


def _spqr(quant: QuantizationConfig) -> StoredFormat:
    bits = bits_of(quant, default=3)
    first = number_of(quant.get("beta1", 16), "beta1")
    second = number_of(quant.get("beta2", 16), "beta2")
    if first < 1 or second < 1:
        raise BadConfigError(
            f"beta1 is {first:g} and beta2 is {second:g}: both must be at least 1",
            f"{FIELD}.beta1",
        )
    levels = SPQR_STATISTICS_BITS / first + SPQR_SECOND_LEVEL_BITS / (first * second)
    return of_bits("spqr", bits + levels + SPQR_OUTLIER_BITS)


def _quark(quant: QuantizationConfig) -> StoredFormat:
    weight = first_field(quant.get("global_quant_config"), "weight")
    first = weight[0] if isinstance(weight, list) and weight else weight
    return format_of_dtype_name(
        "quark", str(first_field(first, "dtype") or "").lower(), group_of(first)
    )


def _exl(method: str) -> Callable[[QuantizationConfig], StoredFormat]:
    def read(quant: QuantizationConfig) -> StoredFormat:
        return of_bits(method, bits_of(quant))

    return read


def _auto_round(quant: QuantizationConfig) -> StoredFormat:
    kind, group = str(quant.get("data_type", "int")).lower(), group_of(quant, default=128)
    bits = bits_of(quant)
    if kind.startswith("int"):
        return integers("auto_round", bits, group, bits)
    if bits == DEFAULT_BITS:
        return StoredFormat("mxfp4" if kind.startswith("mx") else "nvfp4")
    return format_of_dtype_name("auto_round", f"fp{bits:g}", group)


# The reader of each method's fields.
READERS: dict[str, Callable[[QuantizationConfig], StoredFormat]] = {
    **{name: _packed_zeros(name) for name in ("gptq", "awq", "intel/auto-round", "moe_wna16")},
    **{name: _packed_zeros(name.partition("_")[0]) for name in ("gptq_marlin", "awq_marlin")},
    **{name: _integers(name, 64) for name in ("metal", "mlx", "sinq", "gemma", "bitblas")},
    "marlin": _packed_zeros("gptq"),
    "auto-round": _auto_round,
    "auto_round": _auto_round,
    "bitsandbytes": _bitsandbytes,
    "hqq": _hqq,
    "bitnet": lambda _: StoredFormat("ternary", None, "bitnet:2"),  # four weights per byte
    "aqlm": _aqlm,
    "vptq": _vptq,
    "higgs": _integers("higgs", 256),
    "spqr": _spqr,
    "quanto": _named_dtype("quanto", "weights"),
    "torchao": _torchao,
    "fp_quant": _named_dtype("fp_quant", "forward_dtype"),
    "fouroversix": _named_dtype("fouroversix", "weight_dtype", "dtype"),
    "quark": _quark,
    "exl2": _exl("exl2"),
    "exl3": _exl("exl3"),
}


def known_methods() -> tuple[str, ...]:
    """Return the names of all supported methods."""
    return tuple(sorted({*READERS, *FIXED, "compressed-tensors", "modelopt"}))


def not_read(method: str) -> NotCoveredError:
    """Return the error for a method with an unknown format, with alternatives."""
    return NotCoveredError(
        f"quantization_config is of {method!r}, whose format is not known: known are "
        f"{', '.join(known_methods())}; or leave quantization_config out and say how the weights "
        "are stored by strategy.weight_dtype or strategy.quantization, as in exl2:4.25",
        f"{FIELD}.quant_method",
    )


def groups_of(quant: QuantizationConfig) -> list[QuantizationConfig]:
    """Return the weight description of each configuration group.

    Raises:
        BadConfigError: a group is not an object.
    """
    groups = quant.get("config_groups")
    if groups is None:
        return []
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise BadConfigError(
            f"config_groups is {groups!r}: it must be an object of objects",
            f"{FIELD}.config_groups",
        )
    weights = (group.get("weights") for group in groups.values())
    return [weight for weight in weights if isinstance(weight, dict)]


def of_group(weights: QuantizationConfig, packing: str) -> StoredFormat:
    """Return the format of one configuration group.

    compressed-tensors stores no zero point of symmetric groups, which are its default
    (compressed_tensors/quantization/quant_args.py, compressors/quantized_compressors/
    pack_quantized.py: ``weight_zero_point`` is packed like the weights).

    Raises:
        NotCoveredError: the number type of the weights is unknown.
    """
    group, kind = group_of(weights), str(weights.get("type", "int")).lower()
    bits = bits_of(weights, default=8)
    if kind == "int":
        return integers("compressed", bits, group, 0.0 if weights.get("symmetric", True) else bits)
    if kind != "float" or bits not in FLOATS_BY_BITS:
        raise not_read(f"compressed-tensors {kind} of {bits:g} bits")
    dtype = FLOATS_BY_BITS[bits]
    if dtype == "nvfp4" and "mxfp4" in packing:
        return StoredFormat("mxfp4", group)
    return StoredFormat(dtype, group)


def first_known(methods: Iterable[str], quant: QuantizationConfig) -> StoredFormat | None:
    """Return the format of the first known method, read from its fields; None if none is known."""
    for method in methods:
        if method in READERS:
            return READERS[method](quant)
        if method in FIXED:
            return StoredFormat(FIXED[method], group_of(quant))
    return None


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


def _block_size(quant: QuantizationConfig) -> int | None:
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


def _description(reader: ConfigReader) -> QuantizationConfig:
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


def _method(quant: QuantizationConfig) -> str:
    return str(first_field(quant, *NAMES) or ("mlx" if first_field(quant, "bits") else "")).lower()


def _stored(reader: ConfigReader, quant: QuantizationConfig) -> StoredFormat:
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


def _named_parts(quant: QuantizationConfig) -> dict[WeightPart, Dtype]:
    """Return the format of each part from a list with one entry per module."""
    listed = quant.get("quantized_layers")
    if not isinstance(listed, dict) or _method(quant) != "mixed_precision":
        return {}
    dtype_by_part: dict[WeightPart, Dtype] = {}
    for module, settings in listed.items():
        algorithm = str(first_field(settings, "quant_algo") or "").lower()
        for part, samples in SAMPLES.items():
            if algorithm in FIXED and any(_matches(module, sample) for sample in samples):
                dtype_by_part.setdefault(part, FIXED[algorithm])
    if quant.get("moe_quant_algo"):
        return {}
    return dtype_by_part


def _skipped_parts(
    reader: ConfigReader, quant: QuantizationConfig, plain: Dtype
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


def _patterns(quant: QuantizationConfig) -> list[str]:
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
        try:
            re.compile(pattern[3:] if pattern.startswith("re:") else "")
        except re.error as error:
            raise BadConfigError(
                f"{pattern!r} is not a valid regular expression: {error}", f"{FIELD}.ignore"
            ) from error
    return patterns


def _full_precision_modules(quant: QuantizationConfig) -> list[str]:
    """Return the modules that per-module settings keep in 16 or 32 bits."""
    dynamic, extra = quant.get("dynamic"), quant.get("extra_config")
    skipped = [f"re:{name[2:]}" for name in dynamic or {} if str(name).startswith("-:")]
    if not isinstance(extra, dict):
        return skipped
    full_precision = [name for name, own in extra.items() if first_field(own, "bits") in {16, 32}]
    return skipped + full_precision


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
