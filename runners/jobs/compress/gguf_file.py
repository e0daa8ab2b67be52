"""Write a Llama-shaped model folder as one GGUF file, and read it back against the folder.

The gguf package encodes F16, Q8_0 and Q4_0, ``k_quants`` encodes K-quants; the package's decoder
reads all of them back.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import (
    MODEL_ARCH,
    GGUFReader,
    GGUFWriter,
    get_tensor_name_map,
    quants,
)
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from runners.compress_options import GgufType
from runners.jobs.compress.gguf_tokens import write_tokens
from runners.jobs.compress.gguf_types import FILE_TYPES, OUTPUT, encoded, is_as_written, type_of
from runners.jobs.runtime import BadInputError
from runners.jobs.weights import WeightReader

ARCHITECTURE = "llama"
WRITABLE = ("llama", "mistral")  # model types that llama.cpp reads as llama
Array = npt.NDArray[np.float32]


class ReadBackError(Exception):
    """The file does not hold the weights that were written."""


def check_writable(config: PretrainedConfig) -> None:
    """Raise BadInputError unless the model is a plain Llama with default RoPE."""
    if config.model_type not in WRITABLE:
        msg = (
            f"gguf writes models of type {' and '.join(WRITABLE)}, and this one is "
            f"'{config.model_type}'; convert it with llama.cpp's own script"
        )
        raise BadInputError(msg)
    kind = _rope(config).get("rope_type", "default")
    if kind != "default":
        msg = (
            f"the positions are scaled by '{kind}', which gguf does not write here; convert it "
            "with llama.cpp's own script"
        )
        raise BadInputError(msg)


def write_gguf(
    path: Path,
    config: PretrainedConfig,
    reader: WeightReader,
    tokenizer: PreTrainedTokenizerFast,
    kind: GgufType,
) -> None:
    """Write metadata, tokenizer and tensors; buffer encoded tensors in a temporary file."""
    writer = GGUFWriter(path, ARCHITECTURE, use_temp_file=True)
    _write_shape(writer, config)
    writer.add_file_type(FILE_TYPES[kind])
    write_tokens(writer, tokenizer, int(config.vocab_size))
    names, layers = names_of(config, reader), int(config.num_hidden_layers)
    is_tied = OUTPUT not in names.values()
    for name, gguf_name in names.items():
        array = rearranged(name, _array(reader.read(name)), config)
        stored = type_of(gguf_name, array, kind, layers, is_tied=is_tied)
        writer.add_tensor(gguf_name, encoded(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_back(
    path: Path, config: PretrainedConfig, reader: WeightReader
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each weight of the file, dequantised, under its name in the folder.

    Raises:
        ReadBackError: a tensor is missing, or its error exceeds the tolerance of its type.
    """
    tensors = {each.name: each for each in GGUFReader(path).tensors}
    for name, gguf_name in names_of(config, reader).items():
        if gguf_name not in tensors:
            raise ReadBackError(f"{gguf_name} is not in {path.name}")
        stored = tensors[gguf_name]
        array = rearranged(name, _array(reader.read(name)), config)
        dequantised = quants.dequantize(stored.data, stored.tensor_type).reshape(array.shape)
        if not is_as_written(array, dequantised, stored.tensor_type):
            kind = stored.tensor_type.name
            raise ReadBackError(f"{gguf_name} reads back further off than {kind} allows")
        yield name, torch.from_numpy(rearranged(name, dequantised, config, back=True).copy())


def names_of(config: PretrainedConfig, reader: WeightReader) -> Mapping[str, str]:
    """Return a mapping of the folder's tensor names to llama.cpp's.

    Raises:
        BadInputError: a tensor has no name in GGUF.
    """
    table = get_tensor_name_map(MODEL_ARCH.LLAMA, int(config.num_hidden_layers))
    names: dict[str, str] = {}
    for name in reader.names:
        gguf_name = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            msg = f"{name} has no name in GGUF; convert it with llama.cpp's own script"
            raise BadInputError(msg)
        names[name] = gguf_name
    return names


def rearranged(name: str, array: Array, config: PretrainedConfig, *, back: bool = False) -> Array:
    """Permute the rows of q_proj and k_proj to llama.cpp's interleaved RoPE order, or ``back``."""
    if "q_proj" in name:
        heads = int(config.num_attention_heads)
    elif "k_proj" in name:
        heads = int(config.num_key_value_heads)
    else:
        return array
    parts = (heads, -1, 2) if back else (heads, 2, array.shape[0] // heads // 2)
    return array.reshape(*parts, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _write_shape(writer: GGUFWriter, config: PretrainedConfig) -> None:
    heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
    head_dim = int(getattr(config, "head_dim", None) or hidden // heads)
    writer.add_context_length(int(config.max_position_embeddings))
    writer.add_embedding_length(hidden)
    writer.add_block_count(int(config.num_hidden_layers))
    writer.add_feed_forward_length(int(config.intermediate_size))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.num_key_value_heads))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(float(config.rms_norm_eps))
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(_rope(config).get("rope_theta", 10_000.0)))
    writer.add_vocab_size(int(config.vocab_size))
    writer.add_quantization_version(2)


def _rope(config: PretrainedConfig) -> dict[str, Any]:
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return parameters


def _array(tensor: torch.Tensor) -> Array:
    return tensor.float().cpu().numpy()
