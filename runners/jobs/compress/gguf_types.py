"""Which type each tensor of a GGUF file has, how its bytes are made, and how far off it may be."""

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
# As llama.cpp does where a row is no multiple of 256: the next wider type of blocks of 32.
NARROW_ROWS = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}
BLOCK = 32  # weights of a row that share a scale
# Of a block's largest weight, how far a weight may come back: half a step, and what a block's
# other end, or codes of its scales, take off.
TOLERANCES = {
    "F32": 1e-6, "F16": 1e-3, "Q8_0": 0.005, "Q4_0": 0.13, "Q5_0": 0.065, "Q5_1": 0.05,
    "Q4_K": 0.15, "Q5_K": 0.08, "Q6_K": 0.04,
}  # fmt: skip
OUTPUT, EMBEDDING = "output.weight", "token_embd.weight"
SENSITIVE = re.compile(r"blk\.(\d+)\.(attn_v|ffn_down)\.weight")


def type_of(
    name: str, array: Array, kind: GgufType, num_layers: int, *, is_tied: bool = False
) -> Type:
    """Return as what a tensor is stored: vectors as F32, rows that blocks do not fill as F16."""
    if array.ndim == 1:
        return Type.F32
    if array.shape[1] % BLOCK:
        return Type.F16
    if kind not in K_TYPES:
        return Type[kind]
    wanted = _mixed(name, K_TYPES[kind], num_layers, is_tied=is_tied)
    return NARROW_ROWS[wanted] if array.shape[1] % k_quants.BLOCK else wanted


def _mixed(name: str, base: Type, num_layers: int, *, is_tied: bool) -> Type:
    """Return a type of llama.cpp's mixture M: more bits where rounding costs most.

    That is the output, and values and down projections of the first and last eighth of the
    layers and of each third one between.
    """
    if name == (EMBEDDING if is_tied else OUTPUT):
        return Type.Q6_K
    found = SENSITIVE.fullmatch(name)
    if found is None:
        return base
    layer, eighth = int(found[1]), num_layers // 8
    is_outer = layer < eighth or layer >= 7 * num_layers // 8
    is_third = (layer - eighth + 1) % 3 == 0
    return Type.Q6_K if is_outer or is_third else base


def encoded(array: Array, kind: Type) -> npt.NDArray[np.generic]:
    """Return a tensor's rows as bytes of a type, or as the floats that they are."""
    if kind in k_quants.WRITERS:
        return k_quants.quantize(array, kind)
    found: npt.NDArray[np.generic] = quants.quantize(array, kind)
    return found


def is_as_written(before: Array, after: Array, stored: Type) -> bool:
    """Return whether what was read back is as near to the weights as its type allows."""
    block = k_quants.BLOCK if stored in k_quants.WRITERS else BLOCK
    size = block if before.size % block == 0 else before.size
    wanted, found = (each.reshape(-1, size) for each in (before, after))
    allowed = TOLERANCES[stored.name] * np.abs(wanted).max(axis=1) + 1e-6
    return bool((np.abs(wanted - found).max(axis=1) <= allowed).all())
