"""Formats of stored weights, from bits, groups and algorithm names in a config."""

import math
import re
from dataclasses import dataclass
from typing import Any

from planner.catalog.packed import MOST_BITS, PLAIN_BITS, PackedFormat
from planner.errors import BadConfigError
from planner.specs.base import Dtype
from planner.specs.spellings import SCALE_BITS, grouped_format

FIELD = "model.quantization_config"
Described = dict[str, Any]


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


def named(value: object, *names: str) -> object:
    """Return the first present field of a description, or None."""
    description = value if isinstance(value, dict) else {}
    return next((description[name] for name in names if description.get(name) is not None), None)


def number_of(value: object, field: str) -> float:
    """Return a number, also from text.

    Raises:
        BadConfigError: it is not a number.
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
        BadConfigError: it is not a number.
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
        BadConfigError: it is not a valid number of bits.
    """
    stated = (
        (name, bits_field)
        for description in descriptions
        for name in BIT_NAMES
        if (bits_field := named(description, name)) is not None
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
    return packed(grouped_format(method, bits, group, zero_bits), bits)


def packed(name: str, bits: float) -> StoredFormat:
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
    return packed(f"{method}:{bits:g}", bits)
