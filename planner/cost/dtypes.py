"""Bytes per element of each dtype, with group metadata for quantised formats."""

from planner.specs.base import Dtype

ELEMENT_BITS: dict[Dtype, float] = {
    "fp32": 32,
    "tf32": 32,
    "bf16": 16,
    "fp16": 16,
    "fp8": 8,
    "int8": 8,
    "int4": 4,
    "nvfp4": 4,
    "mxfp4": 4,
    "nf4": 4,
    "ternary": 1.6,
}
# Bits of scale and zero point per group, and the default group size. A group size of 0 is one
# scale per output channel, which is negligible.
# Sources: torchao int4 stores a 16-bit scale and zero per group; the OCP MX and NVFP4 formats
# fix groups of 32 and 16 with 8-bit scales; QLoRA's double quantisation costs 0.127 bit.
# int8 has groups only if a size is given: a 16-bit scale and an 8-bit zero, as in GPTQ.
GROUP_METADATA_BITS: dict[Dtype, float] = {
    "int8": 24,
    "int4": 32,
    "nvfp4": 8,
    "mxfp4": 8,
    "nf4": 8.128,
}
DEFAULT_GROUP: dict[Dtype, int] = {"int4": 128, "nvfp4": 16, "mxfp4": 32, "nf4": 64}
FIXED_GROUP: frozenset[Dtype] = frozenset({"nvfp4", "mxfp4"})
SIXTEEN_BIT: frozenset[Dtype] = frozenset({"bf16", "fp16"})
WIDE: frozenset[Dtype] = frozenset({"fp32", "tf32", "bf16", "fp16"})
BITS_PER_BYTE = 8


def element_bytes(dtype: Dtype) -> float:
    """Return the bytes of one element without any metadata."""
    return ELEMENT_BITS[dtype] / BITS_PER_BYTE


def group_size_of(dtype: Dtype, group_size: int | None) -> int:
    """Return the number of weights per scale; 0 for one scale per channel or none."""
    if dtype in FIXED_GROUP or group_size is None:
        return DEFAULT_GROUP.get(dtype, 0)
    return group_size if dtype in GROUP_METADATA_BITS else 0


def weight_bytes_per_element(
    dtype: Dtype,
    group_size: int | None = None,
    *,
    whole_scales: bool = False,
    group_bits: float | None = None,
) -> float:
    """Return the bytes of one stored weight, with its share of the group's metadata.

    ``whole_scales`` stay in fp32; otherwise NF4 uses double quantisation. ``group_bits`` are those
    of a group's scale and zero point where a checkpoint says them.

    >>> weight_bytes_per_element("int4", 128), weight_bytes_per_element("int4", 32, group_bits=16)
    (0.53125, 0.5625)
    """
    group = group_size_of(dtype, group_size)
    usual = GROUP_METADATA_BITS.get(dtype, 0.0) if group_bits is None else group_bits
    each = ELEMENT_BITS["fp32"] if whole_scales else usual
    metadata = each / group if group else 0.0
    return (ELEMENT_BITS[dtype] + metadata) / BITS_PER_BYTE


def unquantised_dtype(dtype: Dtype) -> Dtype:
    """Return the dtype of norms, embeddings and output head for quantised linear weights."""
    return dtype if dtype in WIDE else "bf16"
