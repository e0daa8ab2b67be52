"""GGUF tensor types: choice per tensor, encoding, and read-back tolerances."""

import re

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType, quants

from runners.compress_options import GgufType
from runners.jobs.compress import k_quants

Array = npt.NDArray[np.float32]
FILE_TYPES: dict[GgufType, LlamaFileType] = {
    "F16": LlamaFileType.MOSTLY_F16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
    "Q4_K_M": LlamaFileType.MOSTLY_Q4_K_M,
    "Q5_K_M": LlamaFileType.MOSTLY_Q5_K_M,
    "Q6_K": LlamaFileType.MOSTLY_Q6_K,
}
K_TYPES: dict[GgufType, Type] = {"Q4_K_M": Type.Q4_K, "Q5_K_M": Type.Q5_K, "Q6_K": Type.Q6_K}
# Types for rows that are no multiple of 256, as in llama.cpp: the next wider with blocks of 32.
NARROW_ROWS = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}
BLOCK = 32  # weights per scale
# Read-back tolerance relative to a block's largest weight: half a step, plus the clipping error at
# the block's other end and the quantisation error of its scales.
TOLERANCES = {
    "F32": 1e-6, "F16": 1e-3, "Q8_0": 0.005, "Q4_0": 0.13, "Q5_0": 0.065, "Q5_1": 0.05,
    "Q4_K": 0.15, "Q5_K": 0.08, "Q6_K": 0.04,
}  # fmt: skip
OUTPUT, EMBEDDING = "output.weight", "token_embd.weight"
SENSITIVE = re.compile(r"blk\.(\d+)\.(attn_v|ffn_down)\.weight")


def type_of(
    name: str, array: Array, kind: GgufType, num_layers: int, *, is_tied: bool = False
) -> Type:
    """Return the storage type of a tensor: F32 for vectors, F16 for rows not a multiple of 32."""
    if array.ndim == 1:
        return Type.F32
    if array.shape[1] % BLOCK:
        return Type.F16
    if kind not in K_TYPES:
        return Type[kind]
    stored = _mixed(name, K_TYPES[kind], num_layers, is_tied=is_tied)
    return NARROW_ROWS[stored] if array.shape[1] % k_quants.BLOCK else stored


def _mixed(name: str, base: Type, num_layers: int, *, is_tied: bool) -> Type:
    """Return a tensor's type in llama.cpp's mixture M: Q6_K for sensitive tensors.

    These are the output, and the value and down projections of the first and last eighth of the
    layers and of every third layer between.
    """
    if name == (EMBEDDING if is_tied else OUTPUT):
        return Type.Q6_K
    match = SENSITIVE.fullmatch(name)
    if match is None:
        return base
    layer, eighth = int(match[1]), num_layers // 8
    is_outer = layer < eighth or layer >= 7 * num_layers // 8
    is_third = (layer - eighth + 1) % 3 == 0
    return Type.Q6_K if is_outer or is_third else base


def encoded(array: Array, kind: Type) -> npt.NDArray[np.generic]:
    """Encode a tensor's rows as ``kind``."""
    if kind in k_quants.WRITERS:
        return k_quants.quantize(array, kind)
    data: npt.NDArray[np.generic] = quants.quantize(array, kind)
    return data


def is_as_written(before: Array, after: Array, stored: Type) -> bool:
    """Return whether the read-back weights are within the tolerance of their type."""
    block = k_quants.BLOCK if stored in k_quants.WRITERS else BLOCK
    size = block if before.size % block == 0 else before.size
    expected, actual = (each.reshape(-1, size) for each in (before, after))
    allowed = TOLERANCES[stored.name] * np.abs(expected).max(axis=1) + 1e-6
    return bool((np.abs(expected - actual).max(axis=1) <= allowed).all())
