"""Encode weights as llama.cpp's K-quants: blocks of 256 weights with quantised scales.

The gguf package decodes these types but does not encode them. Source: ggml's block layouts, as
decoded by ``gguf.quants``.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
BLOCK = 256  # weights per super-block, which share the scale of their scales
BLOCKS_AT_ONCE = 4096  # a million weights at once, to limit memory
SUB_BLOCK, SIGNED_SUB_BLOCK = 32, 16
SCALE_LEVELS = 63  # Q4_K and Q5_K store scales and offsets as 6-bit codes
SIGNED_SCALE_LEVELS = 127
TRIES = 11  # candidate steps per sub-block, near the widest one


class Fit(NamedTuple):
    """Scale (step) and offset (negated minimum, at least 0) of each sub-block."""

    scale: Floats
    offset: Floats


def quantize(rows: Floats, kind: Type) -> Bytes:
    """Encode rows as Q4_K, Q5_K or Q6_K; the row length must be a multiple of 256."""
    blocks = rows.reshape(-1, BLOCK)
    parts = [
        WRITERS[kind](blocks[at : at + BLOCKS_AT_ONCE])
        for at in range(0, len(blocks), BLOCKS_AT_ONCE)
    ]
    return np.concatenate(parts).reshape(rows.shape[0], -1)


def _offset_codes(blocks: Floats, levels: int) -> tuple[Floats, Floats, Fit, Bytes]:
    """Return the block's scale and offset steps, the sub-blocks' codes, and the weights' codes."""
    values = blocks.reshape(len(blocks), -1, SUB_BLOCK)
    fit = best_fit(values, levels)
    step, low = (_half(each.max(axis=1) / SCALE_LEVELS) for each in fit)
    codes = Fit(_coded(fit.scale, step), _coded(fit.offset, low))
    scale = (step[:, None] * codes.scale)[:, :, None]
    offset = (low[:, None] * codes.offset)[:, :, None]
    weights = np.rint(_divided(values + offset, scale)).clip(0, levels).astype(np.uint8)
    return step, low, codes, weights


def best_fit(values: Floats, levels: int) -> Fit:
    """Return the scale and offset of each sub-block with the least weighted rounding error.

    Large weights count more. Offsets are at least zero, so that zero is in range.
    """
    lowest = np.minimum(values.min(axis=-1), 0.0)
    width = values.max(axis=-1) - lowest
    importance = np.abs(values) + np.sqrt((values**2).mean(axis=-1, keepdims=True))
    best, least = Fit(width / levels, -lowest), np.full(width.shape, np.inf, np.float32)
    for stretch in np.linspace(-1.0, 1.0, TRIES):
        steps = _divided(np.full_like(width, levels + stretch), width)[..., None]
        codes = np.rint(steps * (values - lowest[..., None])).clip(0, levels)
        candidate = _least_squares(values, codes, importance)
        error = (candidate.scale[..., None] * codes - candidate.offset[..., None] - values) ** 2
        total = (importance * error).sum(axis=-1)
        is_better = total < least
        least = np.where(is_better, total, least)
        best = Fit(
            *(np.where(is_better, new, old) for new, old in zip(candidate, best, strict=True))
        )
    return best


def _least_squares(values: Floats, codes: Floats, importance: Floats) -> Fit:
    """Return the weighted least-squares scale and offset for given codes."""
    total = importance.sum(axis=-1)
    of_codes, of_values = (importance * codes).sum(axis=-1), (importance * values).sum(axis=-1)
    squares = (importance * codes**2).sum(axis=-1)
    products = (importance * codes * values).sum(axis=-1)
    spread = total * squares - of_codes**2
    scale = _divided(total * products - of_codes * of_values, spread)
    offset = _divided(of_codes * products - squares * of_values, spread)
    is_above = offset < 0.0  # all values are positive: only the scale is fitted
    scale = np.where(is_above, _divided(products, squares), scale)
    return Fit(np.maximum(scale, 0.0), np.where(is_above, 0.0, offset))


def _q4_k(blocks: Floats) -> Bytes:
    step, low, codes, weights = _offset_codes(blocks, 15)
    return np.hstack([_bytes(step), _bytes(low), _packed_scales(codes), _nibbles(weights)])


def _q5_k(blocks: Floats) -> Bytes:
    step, low, codes, weights = _offset_codes(blocks, 31)
    bits = (weights >> 4) << np.arange(8, dtype=np.uint8)[None, :, None]
    high = np.bitwise_or.reduce(bits, axis=1)
    head = [_bytes(step), _bytes(low), _packed_scales(codes)]
    return np.hstack([*head, high, _nibbles(weights & np.uint8(0x0F))])


def _nibbles(weights: Bytes) -> Bytes:
    """Pack 4-bit codes [blocks, 8, 32] in pairs of sub-blocks, the first in the low nibble."""
    pairs = weights.reshape(len(weights), 4, 2, SUB_BLOCK)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << np.uint8(4))).reshape(len(weights), -1)


def _packed_scales(codes: Fit) -> Bytes:
    """Pack eight 6-bit scales and eight 6-bit offsets into 12 bytes."""
    scale, offset = (each.astype(np.uint8) for each in codes)
    return np.hstack(
        [
            scale[:, :4] | ((scale[:, 4:] >> 4) << 6),
            offset[:, :4] | ((offset[:, 4:] >> 4) << 6),
            (scale[:, 4:] & 0x0F) | ((offset[:, 4:] & 0x0F) << 4),
        ]
    )


def _q6_k(blocks: Floats) -> Bytes:
    values = blocks.reshape(len(blocks), -1, SIGNED_SUB_BLOCK)
    fit = signed_fit(values)
    step = _half(np.abs(fit).max(axis=1) / SIGNED_SCALE_LEVELS)
    scales = np.rint(_divided(fit, step[:, None])).clip(-128, 127)
    codes = np.rint(_divided(values, (step[:, None] * scales)[:, :, None])).clip(-32, 31)
    halves = (codes + 32).astype(np.uint8).reshape(len(blocks), 2, 4, 32)
    low = halves.reshape(len(blocks), 2, 2, 64) & 0x0F
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None]
    high = np.bitwise_or.reduce((halves >> 4) << shifts, axis=2)
    parts = (low[:, :, 0] | (low[:, :, 1] << 4), high, scales.astype(np.int8).view(np.uint8))
    return np.hstack([*(each.reshape(len(blocks), -1) for each in parts), _bytes(step)])


def signed_fit(values: Floats) -> Floats:
    """Return the signed scale of each sub-block with the least weighted rounding error.

    Codes are -32 to 31; candidate scales map the weight of largest size to values near -32.
    """
    at = np.abs(values).argmax(axis=-1)[..., None]
    largest = np.take_along_axis(values, at, axis=-1)[..., 0]
    best = np.zeros_like(largest)
    least = np.full(largest.shape, np.inf, np.float32)
    for end in np.linspace(-33.0, -29.0, TRIES):
        codes = np.rint(_divided(values * end, largest[..., None])).clip(-32, 31)
        squares = values**2
        scale = _divided(
            (squares * codes * values).sum(axis=-1), (squares * codes**2).sum(axis=-1)
        )
        error = (squares * (scale[..., None] * codes - values) ** 2).sum(axis=-1)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    return best


def _coded(values: Floats, step: Floats) -> Floats:
    return np.rint(_divided(values, step[:, None])).clip(0, SCALE_LEVELS)


def _divided(value: Floats, divisor: Floats) -> Floats:
    """Return the quotient in FP32, zero where the divisor is zero."""
    shape = np.broadcast_shapes(value.shape, divisor.shape)
    return np.divide(value, divisor, out=np.zeros(shape, np.float32), where=divisor != 0)


def _half(values: Floats) -> Floats:
    """Return values rounded to FP16, their storage dtype."""
    return values.astype(np.float16).astype(np.float32)


def _bytes(values: Floats) -> Bytes:
    return values.astype(np.float16).view(np.uint8).reshape(len(values), 2)


WRITERS: Mapping[Type, Callable[[Floats], Bytes]] = {
    Type.Q4_K: _q4_k,
    Type.Q5_K: _q5_k,
    Type.Q6_K: _q6_k,
}
