"""Lossless codec for columns of numbers in one compressed blob.

Integers: second differences, zig-zag, the smallest width that holds them, bytes shuffled.
Floats: the same on ``value * 10**k`` if that is exact for k <= 3, else the XOR with the
previous value, as float32 if that is lossless. All columns share one zstd frame; byte 0
names the codec, so that others can be added.
"""

import struct
from collections.abc import Sequence

import numpy as np
import zstandard
from numpy.typing import NDArray

CODEC_ZSTD_COLUMNS = 1
LEVEL = 3
MAX_DECIMALS = 3
_EXACT_INTEGER = float(2**52)
_KIND_INTEGERS = 0
_KIND_DECIMALS = 10  # plus k
_KIND_XOR32 = 32
_KIND_XOR64 = 64
_HEADER = struct.Struct("<HI")  # columns, rows
_COLUMN = struct.Struct("<BBI")  # kind, width in bytes, payload bytes
_WIDTHS = (1, 2, 4, 8)

Column = NDArray[np.int64] | NDArray[np.float64]


def encode(columns: Sequence[Column]) -> bytes:
    """Return the blob of int64 and float64 columns of equal length."""
    rows = len(columns[0])
    if any(len(column) != rows for column in columns):
        lengths = [len(column) for column in columns]
        raise ValueError(f"columns of one blob need one length, got {lengths}")
    parts = [_HEADER.pack(len(columns), rows), *(_encode_column(column) for column in columns)]
    frame = zstandard.ZstdCompressor(level=LEVEL).compress(b"".join(parts))
    return bytes([CODEC_ZSTD_COLUMNS]) + frame


def decode(blob: bytes) -> list[Column]:
    """Return the columns of a blob.

    Raises:
        ValueError: byte 0 names an unknown codec.
    """
    if not blob or blob[0] != CODEC_ZSTD_COLUMNS:
        raise ValueError(f"unknown metric codec {blob[:1].hex() or 'of an empty blob'}")
    raw = zstandard.ZstdDecompressor().decompress(bytes(blob[1:]))
    count, rows = _HEADER.unpack_from(raw)
    offset = _HEADER.size
    columns: list[Column] = []
    for _ in range(count):
        kind, width, size = _COLUMN.unpack_from(raw, offset)
        offset += _COLUMN.size
        columns.append(_decode_column(kind, width, raw[offset : offset + size], rows))
        offset += size
    return columns


def _encode_column(column: Column) -> bytes:
    if np.issubdtype(column.dtype, np.integer):
        return _pack(_KIND_INTEGERS, _differences(column.astype(np.int64)))
    floats = column.astype(np.float64)
    for decimals in range(MAX_DECIMALS + 1):
        scaled = _as_decimals(floats, decimals)
        if scaled is not None:
            return _pack(_KIND_DECIMALS + decimals, _differences(scaled))
    single = _as_single(floats)
    if single is not None:
        return _pack(_KIND_XOR32, _xor(single.view(np.uint32)).astype(np.uint64))
    return _pack(_KIND_XOR64, _xor(floats.view(np.uint64)))


def _as_decimals(floats: NDArray[np.float64], decimals: int) -> NDArray[np.int64] | None:
    """Return ``floats * 10**decimals`` as integers, or None if that is not exact."""
    factor = 10.0**decimals
    if not np.isfinite(floats).all() or (np.abs(floats) > _EXACT_INTEGER / factor).any():
        return None
    scaled = np.rint(floats * factor)
    restored = scaled.astype(np.int64).astype(np.float64) / factor
    is_exact = np.array_equal(restored.view(np.uint64), floats.view(np.uint64))
    return scaled.astype(np.int64) if is_exact else None


def _as_single(floats: NDArray[np.float64]) -> NDArray[np.float32] | None:
    with np.errstate(over="ignore", invalid="ignore"):
        single = floats.astype(np.float32)
        restored = single.astype(np.float64)
    is_exact = np.array_equal(restored.view(np.uint64), floats.view(np.uint64))
    return single if is_exact else None


def _differences(integers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return zig-zagged second differences; overflow wraps and is reversible."""
    steps = np.diff(integers, prepend=np.int64(0))
    steps = np.diff(steps, prepend=np.int64(0))
    return ((steps << 1) ^ (steps >> 63)).view(np.uint64)


def _integers(zigzag: NDArray[np.uint64]) -> NDArray[np.int64]:
    one = np.uint64(1)
    steps = ((zigzag >> one) ^ (np.uint64(0) - (zigzag & one))).view(np.int64)
    return np.cumsum(np.cumsum(steps, dtype=np.int64), dtype=np.int64)


def _xor(bits: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    before = np.concatenate([np.zeros(1, bits.dtype), bits[:-1]])
    mixed: NDArray[np.unsignedinteger] = np.bitwise_xor(bits, before)
    return mixed


def _pack(kind: int, words: NDArray[np.unsignedinteger]) -> bytes:
    largest = int(words.max()) if len(words) else 0
    width = next(width for width in _WIDTHS if largest < 1 << (8 * width))
    narrow = words.astype(f"<u{width}")
    shuffled = narrow.view(np.uint8).reshape(-1, width).T.tobytes()
    return _COLUMN.pack(kind, width, len(shuffled)) + shuffled


def _decode_column(kind: int, width: int, payload: bytes, rows: int) -> Column:
    shuffled = np.frombuffer(payload, np.uint8).reshape(width, rows)
    words = np.ascontiguousarray(shuffled.T).view(f"<u{width}").reshape(rows).astype(np.uint64)
    if kind == _KIND_INTEGERS:
        return _integers(words)
    if kind == _KIND_XOR64:
        return np.bitwise_xor.accumulate(words).view(np.float64)
    if kind == _KIND_XOR32:
        single = np.bitwise_xor.accumulate(words.astype(np.uint32)).view(np.float32)
        return single.astype(np.float64)
    return _integers(words).astype(np.float64) / 10.0 ** (kind - _KIND_DECIMALS)
