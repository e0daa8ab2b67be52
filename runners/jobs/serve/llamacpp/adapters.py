"""Convert a LoRA adapter in peft's format to a GGUF file for llama.cpp.

Standard library only: the engine's environment has neither torch nor numpy. Numbers keep their
stored width. peft's scale is written as the file's alpha, because llama.cpp computes alpha / rank;
rows of q_proj and k_proj are permuted as in the base model.

Sources: safetensors (the project's README: eight bytes of length, a JSON header, the data); GGUF
(docs/gguf.md of ggml, version 3); llama.cpp, src/llama-adapter.cpp (names, alpha).
"""

import json
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from runners.jobs.adapter_config import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    place_of,
    refuse,
    scale_of,
)
from runners.jobs.model_files import read_config
from runners.jobs.runtime import BadInputError

MAX_HEADER_BYTES = 100_000_000  # as in safetensors itself
LENGTH_BYTES = 8  # the file begins with the length of its header
ALIGNMENT = 32
FLOAT_32, TEXT = 6, 8  # GGUF's metadata type numbers
VERSION = 3
ARCHITECTURE = "llama"
READ_AS_LLAMA = ("llama", "mistral")  # as in our own GGUF writer
NAMES = {  # a linear layer's name within its decoder layer -> llama.cpp's
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
LAYERS = "model.layers."
Entry = Mapping[str, Any]  # of the header: dtype, shape, data_offsets


class Width(NamedTuple):
    """A number format: GGUF's type number, its size, and its exponent bits."""

    kind: int
    code: str  # array code of an unsigned integer of the same width
    exponent: int

    @property
    def bytes(self) -> int:
        """Return the bytes per number."""
        return array(self.code).itemsize


WIDTHS = {
    "F32": Width(0, "I", 0x7F80_0000),
    "F16": Width(1, "H", 0x7C00),
    "BF16": Width(30, "H", 0x7F80),
}


class Matrix(NamedTuple):
    """One matrix in its stored, row-major form."""

    name: str
    width: Width
    shape: tuple[int, int]
    data: bytes


def write_adapter(name: str, folder: Path, config: Mapping[str, Any], path: Path) -> None:
    """Write a folder's adapter for the model with this config.

    Raises:
        BadInputError: it is of another kind, damaged, or does not fit the model.
    """
    if (kind := config.get("model_type")) not in READ_AS_LLAMA:
        msg = (
            f"adapters on a model of type {str(kind)[:40]!r} are not written for llama.cpp, only "
            f"on {' and '.join(READ_AS_LLAMA)}; choose the engine slipway, or merge them"
        )
        raise BadInputError(msg)
    adapter_config = read_config(folder / CONFIG_NAME)
    scale, rank = scale_of(name, adapter_config), int(adapter_config["r"])
    matrices = list(_matrices(name, folder / WEIGHTS_NAME, config))
    if not matrices:
        refuse(name, "holds no matrix")
    _check_pairs(name, rank, matrices)
    with path.open("wb") as file:
        _write(file, scale * rank, matrices)


def _matrices(name: str, path: Path, config: Mapping[str, Any]) -> Iterator[Matrix]:
    """Yield every matrix under its llama.cpp name."""
    with path.open("rb") as file:
        header, begin = _header(name, file, path.stat().st_size)
        for key, entry in sorted(header.items()):
            module, side = place_of(name, key)
            gguf_name = _name_of(name, module)
            matrix = _read(name, key, file, begin, entry)
            if side and (heads := HEADS.get(gguf_name.partition("blk.")[2].partition(".")[2])):
                matrix = _permuted(name, matrix, int(config.get(heads) or 0))
            yield matrix._replace(name=f"{gguf_name}.weight.lora_{'ab'[side]}")


def _header(name: str, file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the offset of its data."""
    start = file.read(LENGTH_BYTES)
    length = int.from_bytes(start, "little")
    if len(start) < LENGTH_BYTES or length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
        refuse(name, "is cut off or no safetensors file (its header); copy it again")
    try:
        header = json.loads(file.read(length))
    except ValueError:
        refuse(name, "is no safetensors file (its header is no JSON); copy it again")
    if not isinstance(header, dict):
        refuse(name, "is no safetensors file (its header is no object); copy it again")
    header.pop("__metadata__", None)
    return header, LENGTH_BYTES + length


def _name_of(name: str, module: str) -> str:
    layer, _, linear = module.removeprefix(LAYERS).partition(".")
    if not module.startswith(LAYERS) or not layer.isdecimal() or linear not in NAMES:
        refuse(name, f"changes {module[:120]}, which is not put on a GGUF file here")
    return f"blk.{int(layer)}.{NAMES[linear]}"


def _read(name: str, key: str, file: BinaryIO, begin: int, entry: Entry) -> Matrix:
    """Return a matrix after checking its header and values."""
    try:
        width = WIDTHS[entry["dtype"]]
        rows, columns = map(int, entry["shape"])
        first, end = map(int, entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        refuse(name, f"says nothing sound of {key[:120]}; it is of two sizes and 16 or 32 bits")
    count = rows * columns * width.bytes
    if min(rows, columns) < 1 or first < 0 or end - first != count:
        refuse(name, f"is damaged: {key[:120]} has {end - first} bytes of {count}; copy it again")
    file.seek(begin + first)
    data = file.read(count)
    if len(data) != count:
        refuse(name, f"is cut off within {key[:120]}; copy it again")
    bits = width.exponent
    if any(each & bits == bits for each in array(width.code, data)):
        refuse(name, f"has NaN or infinity in {key[:120]}; train it again")
    return Matrix(key, width, (rows, columns), data)


def _permuted(name: str, matrix: Matrix, heads: int) -> Matrix:
    """Return the rows in llama.cpp's order: the halves of each head interleaved."""
    rows, columns = matrix.shape
    if heads < 1 or rows % (2 * heads):
        refuse(name, f"has {rows} rows in {matrix.name[:120]}, for a base of {heads} heads")
    half, size = rows // heads // 2, columns * matrix.width.bytes
    order = (
        (head * 2 + part) * half + at
        for head in range(heads)
        for at in range(half)
        for part in range(2)
    )
    data = b"".join(matrix.data[each * size : (each + 1) * size] for each in order)
    return matrix._replace(data=data)


def _check_pairs(name: str, rank: int, matrices: Sequence[Matrix]) -> None:
    """Check that every matrix has its counterpart, and the stated rank."""
    names = {each.name for each in matrices}
    for each in matrices:
        stem, side = each.name[:-1], each.name[-1]
        if stem + "ba"[side == "b"] not in names:
            refuse(name, f"holds one of two matrices of {stem.removesuffix('.weight.lora_')}")
        if each.shape[side == "b"] != rank:
            refuse(name, f"has r {rank}, and {each.name} is {list(each.shape)}")


def _write(file: BinaryIO, alpha: float, matrices: Sequence[Matrix]) -> None:
    """Write the metadata, the tensor table, and the data, each aligned to 32 bytes."""
    texts = {"general.type": "adapter", "general.architecture": ARCHITECTURE}
    texts["adapter.type"] = "lora"
    file.write(b"GGUF" + struct.pack("<IQQ", VERSION, len(matrices), len(texts) + 1))
    file.writelines(
        _text(key) + struct.pack("<I", TEXT) + _text(text) for key, text in texts.items()
    )
    file.write(_text("adapter.lora.alpha") + struct.pack("<If", FLOAT_32, alpha))
    offset = 0
    for each in matrices:
        rows, columns = each.shape  # GGUF names the inner dimension first
        file.write(
            _text(each.name) + struct.pack("<IQQIQ", 2, columns, rows, each.width.kind, offset)
        )
        offset += len(each.data) + _padding(len(each.data))
    file.write(bytes(_padding(file.tell())))
    for each in matrices:
        file.write(each.data + bytes(_padding(len(each.data))))


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _padding(count: int) -> int:
    return -count % ALIGNMENT
