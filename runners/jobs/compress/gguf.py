"""Exports a Llama-shaped model folder as GGUF, with K-quants, and reads it back."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gguf import (
    MODEL_ARCH,
    GGUFReader,
    GGUFWriter,
    LlamaFileType,
    TokenType,
    get_tensor_name_map,
    quants,
)
from gguf import GGMLQuantizationType as Type
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from runners.jobs.compress.layerwise import CompressionResult, check_disk
from runners.jobs.compress.whole_model import held_out_of, load_whole
from runners.jobs.evaluation import evaluate
from runners.jobs.events import Stages
from runners.jobs.loading import LoadedModel, load_tokenizer, require_tokenizer, shape_only
from runners.jobs.runtime import BadInputError, Job, weight_file_bytes
from runners.jobs.weights import WeightReader, config_of
from runners.jobspec import CompressSpec
from runners.jobspec.compress import GgufType

# Encode weights as llama.cpp's K-quants: blocks of 256 weights with quantised scales.
#
# The gguf package decodes these types but does not encode them. Source: ggml's block layouts, as
# decoded by ``gguf.quants``.


Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
SUPER_BLOCK = 256  # weights per super-block, which share the scale of their scales
BLOCKS_AT_ONCE = 4096  # a million weights at once, to limit memory
SUB_BLOCK, SIGNED_SUB_BLOCK = 32, 16
SCALE_LEVELS = 63  # Q4_K and Q5_K store scales and offsets as 6-bit codes
SIGNED_SCALE_LEVELS = 127
TRIES = 11  # candidate steps per sub-block, near the widest one


class SubBlockFit(NamedTuple):
    """Scale (step) and offset (negated minimum, at least 0) of each sub-block."""

    scale: Floats
    offset: Floats


def quantize(rows: Floats, kind: Type) -> Bytes:
    """Encode rows as Q4_K, Q5_K or Q6_K; the row length must be a multiple of 256."""
    blocks = rows.reshape(-1, SUPER_BLOCK)
    parts = [
        WRITERS[kind](blocks[at : at + BLOCKS_AT_ONCE])
        for at in range(0, len(blocks), BLOCKS_AT_ONCE)
    ]
    return np.concatenate(parts).reshape(rows.shape[0], -1)


def _offset_codes(blocks: Floats, levels: int) -> tuple[Floats, Floats, SubBlockFit, Bytes]:
    """Return the block's scale and offset steps, the sub-blocks' codes, and the weights' codes."""
    values = blocks.reshape(len(blocks), -1, SUB_BLOCK)
    fit = best_fit(values, levels)
    step, low = (_half(each.max(axis=1) / SCALE_LEVELS) for each in fit)
    codes = SubBlockFit(_coded(fit.scale, step), _coded(fit.offset, low))
    scale = (step[:, None] * codes.scale)[:, :, None]
    offset = (low[:, None] * codes.offset)[:, :, None]
    weights = np.rint(_divided(values + offset, scale)).clip(0, levels).astype(np.uint8)
    return step, low, codes, weights


def best_fit(values: Floats, levels: int) -> SubBlockFit:
    """Return the scale and offset of each sub-block with the least weighted rounding error.

    Large weights count more. Offsets are at least zero, so that zero is in range.
    """
    lowest = np.minimum(values.min(axis=-1), 0.0)
    width = values.max(axis=-1) - lowest
    importance = np.abs(values) + np.sqrt((values**2).mean(axis=-1, keepdims=True))
    best, least = SubBlockFit(width / levels, -lowest), np.full(width.shape, np.inf, np.float32)
    for stretch in np.linspace(-1.0, 1.0, TRIES):
        steps = _divided(np.full_like(width, levels + stretch), width)[..., None]
        codes = np.rint(steps * (values - lowest[..., None])).clip(0, levels)
        candidate = _least_squares(values, codes, importance)
        error = (candidate.scale[..., None] * codes - candidate.offset[..., None] - values) ** 2
        total = (importance * error).sum(axis=-1)
        is_better = total < least
        least = np.where(is_better, total, least)
        best = SubBlockFit(
            *(np.where(is_better, new, old) for new, old in zip(candidate, best, strict=True))
        )
    return best


def _least_squares(values: Floats, codes: Floats, importance: Floats) -> SubBlockFit:
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
    return SubBlockFit(np.maximum(scale, 0.0), np.where(is_above, 0.0, offset))


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


def _packed_scales(codes: SubBlockFit) -> Bytes:
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


# GGUF tensor types: choice per tensor, encoding, and read-back tolerances.


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
    return NARROW_ROWS[stored] if array.shape[1] % SUPER_BLOCK else stored


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


def encode_rows(array: Array, kind: Type) -> npt.NDArray[np.generic]:
    """Encode a tensor's rows as ``kind``."""
    if kind in WRITERS:
        return quantize(array, kind)
    data: npt.NDArray[np.generic] = quants.quantize(array, kind)
    return data


def is_as_written(before: Array, after: Array, stored: Type) -> bool:
    """Return whether the read-back weights are within the tolerance of their type."""
    block = SUPER_BLOCK if stored in WRITERS else BLOCK
    size = block if before.size % block == 0 else before.size
    expected, actual = (each.reshape(-1, size) for each in (before, after))
    allowed = TOLERANCES[stored.name] * np.abs(expected).max(axis=1) + 1e-6
    return bool((np.abs(expected - actual).max(axis=1) <= allowed).all())


# GGUF tokenizer metadata: token list, token types, merges and pre-tokenizer name.


_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Pre-tokenizer split pattern -> llama.cpp's name.
PRE_TOKENIZERS = {
    "": "gpt-2",
    _SPLIT_PATTERN % r"\p{N}{1,3}": "llama-bpe",
    _SPLIT_PATTERN % r"\p{N}": "qwen2",
}


class Tokens(NamedTuple):
    """Token names and types by id, the merges, and the pre-tokenizer name."""

    names: Sequence[str]
    kinds: Sequence[TokenType]
    merges: Sequence[str]
    pre: str


def tokens_of(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> Tokens:
    """Return a byte-level BPE tokenizer's tokens, padded to the model's vocabulary size.

    Raises:
        BadInputError: the tokenizer type or its pre-tokenizer is not supported.
    """
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    pre = _pre_tokenizer_name(document)
    names = [f"[PAD{number}]" for number in range(vocab_size)]
    kinds = [TokenType.UNUSED] * vocab_size
    for name, number in document["model"]["vocab"].items():
        names[number], kinds[number] = name, TokenType.NORMAL
    for added in document.get("added_tokens") or ():
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        names[added["id"]], kinds[added["id"]] = added["content"], kind
    merges = [
        each if isinstance(each, str) else " ".join(each) for each in document["model"]["merges"]
    ]
    return Tokens(names, kinds, merges, pre)


def write_tokens(writer: GGUFWriter, tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> None:
    """Write the tokenizer metadata to a GGUF file."""
    tokens = tokens_of(tokenizer, vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokens.pre)
    writer.add_token_list(tokens.names)
    writer.add_token_types(tokens.kinds)
    writer.add_token_merges(tokens.merges)
    for number, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.eos_token_id, writer.add_eos_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
    ):
        if number is not None:
            add(number)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
    first = tokenizer("a")["input_ids"][0]
    writer.add_add_bos_token(value=first == tokenizer.bos_token_id)


def _pre_tokenizer_name(document: dict[str, Any]) -> str:
    kind = document["model"]["type"]
    parts = _flat(document.get("pre_tokenizer") or {})
    patterns = [each["pattern"].get("Regex", "?") for each in parts if each["type"] == "Split"]
    is_bytes = any(each["type"] == "ByteLevel" for each in parts)
    name = PRE_TOKENIZERS.get("".join(patterns))
    if kind != "BPE" or not is_bytes or name is None:
        msg = (
            f"its tokenizer is {kind}, which parts text in a way that GGUF has no name for here; "
            "gguf takes byte-level BPE as GPT-2, Llama 3 and Qwen 2 have it"
        )
        raise BadInputError(msg)
    return name


def _flat(part: dict[str, Any]) -> list[dict[str, Any]]:
    return list(part.get("pretokenizers") or ([part] if part else []))


# Write a Llama-shaped model folder as one GGUF file, and read it back against the folder.
#
# The gguf package encodes F16, Q8_0 and Q4_0, ``k_quants`` encodes K-quants; the package's decoder
# reads all of them back.


ARCHITECTURE = "llama"
WRITABLE = ("llama", "mistral")  # model types that llama.cpp reads as llama


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
        array = permute_rope_rows(name, _array(reader.read(name)), config)
        stored = type_of(gguf_name, array, kind, layers, is_tied=is_tied)
        writer.add_tensor(gguf_name, encode_rows(array, stored), raw_dtype=stored)
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
        array = permute_rope_rows(name, _array(reader.read(name)), config)
        dequantised = quants.dequantize(stored.data, stored.tensor_type).reshape(array.shape)
        if not is_as_written(array, dequantised, stored.tensor_type):
            kind = stored.tensor_type.name
            raise ReadBackError(f"{gguf_name}, read back, differs by more than {kind} allows")
        yield (
            name,
            torch.from_numpy(permute_rope_rows(name, dequantised, config, back=True).copy()),
        )


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


def permute_rope_rows(
    name: str, array: Array, config: PretrainedConfig, *, back: bool = False
) -> Array:
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


# Export a model folder as GGUF and evaluate the weights read back from the file.


FILE_NAME = "model.gguf"


def export_gguf(
    source: Path, target: Path, spec: CompressSpec, stages: Stages, job: Job
) -> CompressionResult:
    """Write the file, read it back, and return the perplexity of the weights read back.

    Raises:
        ReadBackError: the file does not hold the weights that were written.
    """
    loaded = load_whole(source, "bf16")
    tokenizer = require_tokenizer(loaded, "a GGUF file")
    config, reader = loaded.model.config, WeightReader(source, loaded.model)
    target.mkdir(parents=True)
    write_gguf(target / FILE_NAME, config, reader, tokenizer, spec.gguf_type)
    parameters = dict(loaded.model.named_parameters())
    for name, weight in read_back(target / FILE_NAME, config, reader):
        parameters[name].data.copy_(weight)
    config.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))
    ids = held_out_of(job, loaded, source)
    perplexity = evaluate(
        loaded.model, ids, spec.evaluation_tokens, stages.via(job.emitter).advance
    )
    return CompressionResult(
        perplexity, {"gguf_bytes": float((target / FILE_NAME).stat().st_size)}
    )


def check_gguf(source: Path, _spec: CompressSpec, job: Job) -> None:
    """Check that the model can be exported as GGUF.

    Raises:
        BadInputError: the model or tokenizer type is not supported, or the disk is too small.
    """
    check_disk(job.attempt_dir, weight_file_bytes(source))
    config = config_of(source)
    check_writable(config)
    loaded = LoadedModel(shape_only(config), load_tokenizer(source), torch.device("cpu"))
    tokens_of(require_tokenizer(loaded, "a GGUF file"), int(config.vocab_size))
