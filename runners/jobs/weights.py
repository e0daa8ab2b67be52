"""Weights on disk and in memory: safetensors, ternary files, pinned host buffers."""

import contextlib
import ctypes
import json
import math
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from runners.jobs.memory import parts_of
from runners.jobs.model_files import (
    GGUF_ENGINES,
    SINGLE,
    gguf_files,
    has_weights,
    read_config,
    runs_code,
    some,
    weight_files,
)
from runners.jobs.own_code import separate_modules
from runners.jobs.runtime import BadInputError

# ---------------------------------------------------------------------------
# Model folders with ternary, entropy-coded experts and otherwise plain tensors.
# ---------------------------------------------------------------------------


# Entropy coding of ternary symbols with an asymmetric numeral system (rANS).
#
# Lanes of symbols are coded in parallel, so that every step is one vector operation; all lanes
# share one stream of 16-bit words. Source: Duda 2013, arXiv:1311.2540; word order as in
# interleaved coders.


Symbols = npt.NDArray[np.uint8]
SYMBOLS = 3
PRECISION_BITS = 12  # frequencies are multiples of 1/4096
TOTAL = 1 << PRECISION_BITS
WORD_BITS = 16
LOWEST = np.uint64(1 << WORD_BITS)  # of a state, which has 32 bits
SYMBOLS_A_LANE = 4096  # a lane's last state costs four bytes


class CorruptCodeError(Exception):
    """The words do not decode to valid symbols."""


@dataclass(frozen=True)
class EncodedStream:
    """A stream of words, the final state of each lane, and the symbol frequencies."""

    words: npt.NDArray[np.uint16]
    states: npt.NDArray[np.uint32]
    frequencies: npt.NDArray[np.uint16]
    count: int

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of everything needed for decoding."""
        return int(self.words.nbytes + self.states.nbytes + self.frequencies.nbytes)


def entropy_bits(symbols: Symbols) -> float:
    """Return the entropy in bits per symbol, the lower bound of symbol codes."""
    shares = np.bincount(symbols.ravel(), minlength=SYMBOLS) / symbols.size
    return float(-(shares[shares > 0] * np.log2(shares[shares > 0])).sum())


def encode(symbols: Symbols) -> EncodedStream:
    """Return ternary symbols (0, 1, 2) as a code."""
    count = symbols.size
    frequencies = frequencies_of(symbols)
    lanes = -(-count // SYMBOLS_A_LANE)
    padded = np.full(lanes * SYMBOLS_A_LANE, frequencies.argmax(), np.uint8)
    padded[:count] = symbols.ravel()
    steps = padded.reshape(lanes, SYMBOLS_A_LANE).T
    parts, starts = frequencies.astype(np.uint64), _starts(frequencies)
    states = np.full(lanes, LOWEST, np.uint64)
    words: list[npt.NDArray[np.uint16]] = []
    for row in steps[::-1]:
        part = parts[row]
        is_full = states >= part << np.uint64(2 * WORD_BITS - PRECISION_BITS)
        words.append((states[is_full] & np.uint64(0xFFFF)).astype(np.uint16))
        states[is_full] >>= np.uint64(WORD_BITS)
        states = (states // part << np.uint64(PRECISION_BITS)) + states % part + starts[row]
    return EncodedStream(np.concatenate(words[::-1]), states.astype(np.uint32), frequencies, count)


def decode(coded: EncodedStream) -> Symbols:
    """Return the symbols of a code.

    Raises:
        CorruptCodeError: words are missing, surplus or changed.
    """
    if coded.frequencies.sum() != TOTAL or len(coded.frequencies) != SYMBOLS:
        raise CorruptCodeError(
            "the symbol frequencies of a ternary code do not have the expected sum"
        )
    parts, starts = coded.frequencies.astype(np.uint64), _starts(coded.frequencies)
    symbol_of = np.repeat(np.arange(SYMBOLS, dtype=np.uint8), coded.frequencies)
    states, at = coded.states.astype(np.uint64), 0
    steps = np.empty((SYMBOLS_A_LANE, len(states)), np.uint8)
    for row in steps:
        place = states & np.uint64(TOTAL - 1)
        row[:] = symbol_of[place]
        states = parts[row] * (states >> np.uint64(PRECISION_BITS)) + place - starts[row]
        is_low = states < LOWEST
        taken = coded.words[at : at + int(is_low.sum())]
        if len(taken) < is_low.sum():
            raise CorruptCodeError("a ternary code is truncated")
        states[is_low] = states[is_low] << np.uint64(WORD_BITS) | taken
        at += len(taken)
    if at != len(coded.words) or (states != LOWEST).any():
        raise CorruptCodeError("a ternary code does not end in the decoder's expected state")
    return steps.T.reshape(-1)[: coded.count]


def frequencies_of(symbols: Symbols) -> npt.NDArray[np.uint16]:
    """Return each symbol's frequency in parts of 4096, at least 1 if it occurs."""
    counts = np.bincount(symbols.ravel(), minlength=SYMBOLS).astype(np.float64)
    parts = np.maximum(np.rint(counts / counts.sum() * TOTAL), counts > 0).astype(np.int64)
    parts[parts.argmax()] += TOTAL - parts.sum()
    frequencies: npt.NDArray[np.uint16] = parts.astype(np.uint16)
    return frequencies


def _starts(frequencies: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint64]:
    starts: npt.NDArray[np.uint64] = (np.cumsum(frequencies) - frequencies).astype(np.uint64)
    return starts


# mypy: disable-error-code="no-untyped-call"
# safetensors and transformers ship functions without types.


QUANT_METHOD = "slipway-ternary"
WORDS, STATES, PARTS, LEVELS, SHAPE = ".words", ".states", ".parts", ".levels", ".shape"
NamedTensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Ternary:
    """Matrices of one stack: symbols [..., out, in] and two levels per row [..., out, 2].

    Symbol 0 is zero, 1 the row's lower level, 2 its upper one.
    """

    symbols: torch.Tensor
    levels: torch.Tensor

    def weight(self) -> torch.Tensor:
        """Return the decoded matrices in the levels' dtype."""
        zero = torch.zeros_like(self.levels[..., :1])
        table = torch.cat([zero, self.levels], dim=-1)
        return torch.gather(table, -1, self.symbols.long())


def tensors_of(name: str, stack: Ternary) -> tuple[NamedTensors, int]:
    """Return the stored tensors of a stack, verified by decoding, and their bytes.

    Raises:
        CorruptCodeError: decoding yields other symbols.
    """
    symbols: Symbols = stack.symbols.to(torch.uint8).cpu().numpy()
    coded = encode(symbols)
    if not np.array_equal(decode(coded), symbols.ravel()):
        raise CorruptCodeError(
            f"the ternary code of {name} does not decode to the encoded symbols"
        )
    stored = {
        WORDS: torch.from_numpy(coded.words.view(np.int16)),
        STATES: torch.from_numpy(coded.states.view(np.int32)),
        PARTS: torch.from_numpy(coded.frequencies.view(np.int16)),
        LEVELS: stack.levels.cpu().contiguous(),
        SHAPE: torch.tensor(symbols.shape),
    }
    return {name + ending: each for ending, each in stored.items()}, sum(
        each.nbytes for each in stored.values()
    )


def save_ternary(folder: Path, model: PreTrainedModel, coded: NamedTensors) -> None:
    """Write config and weights: the coded stacks, and every other tensor unchanged."""
    done = {name.removesuffix(WORDS) for name in coded if name.endswith(WORDS)}
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    plain = {
        name: each.detach().cpu().contiguous()
        for name, each in model.state_dict().items()
        if name not in done and name not in tied
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**plain, **coded}, folder / SINGLE, {"format": "pt"})
    config = {
        **model.config.to_dict(),
        "quantization_config": {"quant_method": QUANT_METHOD, "stacks": sorted(done)},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))


def is_ternary(folder: Path) -> bool:
    """Return whether ``save_ternary`` wrote a folder."""
    stored = read_config(folder / "config.json").get("quantization_config")
    return isinstance(stored, dict) and stored.get("quant_method") == QUANT_METHOD


def load_ternary(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return the folder's model with its experts decoded.

    Raises:
        BadInputError: a code is damaged, or the tensors do not match the config.
    """
    stored = load_file(folder / SINGLE)
    stacks = [name.removesuffix(WORDS) for name in stored if name.endswith(WORDS)]
    try:
        weights = {name: _decoded(stored, name).to(dtype) for name in stacks}
    except (CorruptCodeError, KeyError, RuntimeError) as error:
        msg = f"the experts of {folder} are damaged ({error}); copy the folder again"
        raise BadInputError(msg) from error
    endings = (WORDS, STATES, PARTS, LEVELS, SHAPE)
    weights |= {name: each for name, each in stored.items() if not name.endswith(endings)}
    config = config_of(folder)
    config.quantization_config = None
    del config.quantization_config
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    missing, unknown = model.load_state_dict(weights, strict=False, assign=True)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    if wrong := sorted(set(missing) - tied | set(unknown)):
        msg = f"{folder} and its config.json disagree about {wrong[0]}; copy the folder again"
        raise BadInputError(msg)
    model.tie_weights()
    return model


def _decoded(stored: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    shape = torch.Size(stored[name + SHAPE].tolist())
    coded = EncodedStream(
        stored[name + WORDS].numpy().view(np.uint16),
        stored[name + STATES].numpy().view(np.uint32),
        stored[name + PARTS].numpy().view(np.uint16),
        shape.numel(),
    )
    symbols = torch.from_numpy(decode(coded).copy()).view(shape)
    return Ternary(symbols, stored[name + LEVELS]).weight()


# ---------------------------------------------------------------------------
# Pinned host memory of exactly the size that was asked for.
#
# torch's own (``pin_memory=True``) rounds each tensor up to a power of two and keeps it when it is
# freed (``CachingHostAllocator.h``, torch 2.13): 36 GiB of weights could take 64. Here ordinary
# pages are registered with the driver, and are given back with the last tensor on them.
# ---------------------------------------------------------------------------


PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


class _Pages(mmap.mmap):
    """Anonymous pages, registered with the driver as long as they exist."""

    is_registered = False

    def __del__(self) -> None:
        if self.is_registered:
            with contextlib.suppress(Exception):  # the driver may be gone as the process ends
                torch.cuda.synchronize()  # a copy may still read or write them
                _unregister(_address(self))


def host_empty(shape: Sequence[int], dtype: torch.dtype, *, is_pinned: bool) -> torch.Tensor:
    """Return uninitialised host memory, pinned for the GPU or plain.

    Memory that the driver does not pin, as above a limit of locked pages, is plain: copies are
    then slower and wait, and hold the same.
    """
    count = math.prod(shape)
    if not is_pinned or not count:
        return torch.empty(tuple(shape), dtype=dtype)
    pages = _Pages(-1, count * dtype.itemsize)
    pages.is_registered = _register(_address(pages), len(pages))
    return torch.frombuffer(pages, dtype=dtype, count=count).view(tuple(shape))


def _address(pages: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


def _register(address: int, size: int) -> bool:
    """Register pages with the CUDA or HIP driver; return whether it did."""
    cudart: Any = torch.cuda.cudart()
    return int(cudart.cudaHostRegister(address, size, PORTABLE)) == 0


def _unregister(address: int) -> None:
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(address)


class HostBuffers:
    """Pinned buffers that are used again by tensors of the same size, such as each step's.

    A buffer is free again when the last tensor on it is. Copies into and out of it are ordered by
    the current stream.
    """

    def __init__(self, *, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._free: dict[int, list[torch.Tensor]] = {}
        self.nbytes = 0  # of all buffers, free or not

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous host tensor of this shape and dtype."""
        free = self._free.setdefault(tensor.nbytes, [])
        if not free:
            free.append(host_empty((tensor.nbytes,), torch.uint8, is_pinned=self._is_pinned))
            self.nbytes += tensor.nbytes
        buffer = free.pop()
        view = buffer.view(tensor.dtype).view(tensor.shape)
        weakref.finalize(view, free.append, buffer)
        return view


@contextlib.contextmanager
def activations_in_host(
    buffers: HostBuffers, device_storages: frozenset[int], smallest_bytes: int
) -> Iterator[None]:
    """Hold what the block's forward passes save for their backward passes in host memory.

    ``device_storages`` are the addresses of storages that stay on the device, such as the
    weights'; so do tensors below ``smallest_bytes``. As
    ``torch.autograd.graph.save_on_cpu``, but in reused ``buffers``.
    """

    def pack(tensor: torch.Tensor) -> torch.Tensor | tuple[torch.device, torch.Tensor]:
        is_kept = tensor.untyped_storage().data_ptr() in device_storages
        if is_kept or tensor.nbytes < smallest_bytes:
            return tensor
        host = buffers.empty_like(tensor)
        host.copy_(tensor.detach(), non_blocking=True)
        return tensor.device, host

    def unpack(packed: torch.Tensor | tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        device, host = packed
        return host.clone() if host.device == device else host.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


# ---------------------------------------------------------------------------
# Reads a model folder's tensors individually, and checks that they are complete and finite.
# ---------------------------------------------------------------------------


# mypy: disable-error-code="no-untyped-call"
# safetensors has no types.


COMPUTED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")  # stored by old versions, ignored


class WeightReader:
    """The tensors of a folder's model by name."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        """Open the files and compare names and shapes with the model's.

        Raises:
            BadInputError: a file is truncated, or the tensors do not match the config.
        """
        self._files: dict[str, safe_open] = {}
        for path in weight_files(folder):
            opened = open_weights(path)
            self._files |= dict.fromkeys(_names(opened), opened)
        self._files = {
            name: file for name, file in self._files.items() if not name.endswith(COMPUTED)
        }
        self._compare(folder, model)

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._files)

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor.

        Raises:
            BadInputError: the tensor has NaN or infinity.
        """
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        if not bool(tensor.isfinite().all()):
            msg = f"{name} holds NaN or infinity; train or download the model again"
            raise BadInputError(msg)
        return tensor

    def _compare(self, folder: Path, model: PreTrainedModel) -> None:
        expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        tied = set(getattr(model, "all_tied_weights_keys", None) or {})
        missing = sorted(set(expected) - set(self._files) - tied)
        unknown = sorted(set(self._files) - set(expected))
        if any(".experts." in name for name in unknown):
            raise BadInputError(
                f"a '{model.config.model_type}' model stores its experts one by one, and reading "
                "layer by layer does not take them; choose another method or placement"
            )
        if missing or unknown:
            problems = [
                f"{word} {some(names)}"
                for word, names in (("lack", missing), ("also hold", unknown))
                if names
            ]
            raise BadInputError(
                f"the weights do not match config.json: they {' and '.join(problems)}; "
                f"{why_unlike(folder)}"
            )
        for name, file in self._files.items():
            shape = list(file.get_slice(name).get_shape())
            if shape != expected[name]:
                msg = (
                    f"{name} is {shape} in the weights and {expected[name]} by config.json; give "
                    "the config and the weights of one model"
                )
                raise BadInputError(msg)


def open_weights(path: Path) -> safe_open:
    """Return an opened safetensors file.

    Raises:
        BadInputError: the file is truncated, or not a safetensors file.
    """
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        msg = f"{path.name} is not a complete safetensors file ({error}); copy it again"
        raise BadInputError(msg) from error


def _names(file: safe_open) -> list[str]:
    names: list[str] = file.keys()
    return names


# Checks that a folder's weights are complete, finite and match its config.
#
# The library initialises missing weights randomly and only logs a warning; here each of these
# problems is an error that names it.


# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.


CAUSAL = "AutoModelForCausalLM"  # key of auto_map
PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def checked_model(folder: Path, options: dict[str, Any], *, is_plain: bool) -> PreTrainedModel:
    """Return the library's model of a folder; ``is_plain``: its weights are not quantised.

    Raises:
        BadInputError: a file is truncated, a weight is NaN or infinite, or the weights do not
            match the config.
        MissingModelError: there are no safetensors files of the model, or not all of them.
    """
    gguf_name = _gguf_name(folder)
    if gguf_name is None:
        check_files(folder)
    config_of(folder)
    try:
        loaded_model: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            **own_config(folder),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported by name below
            gguf_file=gguf_name,
            **options,
        )
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        msg = f"cannot load {folder} as a causal language model: {first_line(error)}"
        raise BadInputError(msg) from error
    model: PreTrainedModel = loaded_model[0]
    if is_plain and gguf_name is None:
        check_loaded(folder, loaded_model[1])
    check_finite(model)
    return model


def _gguf_name(folder: Path) -> str | None:
    """Return the GGUF file of a folder that a compression wrote, None for safetensors.

    Raises:
        BadInputError: there are several, or one in parts, of which the library reads the first.
    """
    if has_weights(folder) or not any(folder.glob("*.gguf")):
        return None
    name, *others = (path.name for path in gguf_files(folder))
    if others:
        raise BadInputError(
            f"{folder.name} holds a model in {1 + len(others)} parts, which {GGUF_ENGINES} "
            "serves; to load it, merge them with llama-gguf-split --merge"
        )
    return name


def config_of(folder: Path) -> PretrainedConfig:
    """Return the library's config of a folder.

    Raises:
        BadInputError: its config.json is no model that the library knows.
    """
    if runs_code(folder):
        return _config_by_own_code(folder)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (StrictDataclassError, OSError, ValueError, KeyError, TypeError) as error:
        msg = f"cannot load {folder.name}: its config.json describes no model that is known here"
        reason = first_line(error)
        if read_config(folder / "config.json").get("auto_map"):  # transformers says to trust it
            reason = "the code that its auto_map names never runs; give a model of another type"
        raise BadInputError(f"{msg}: {reason}") from error
    return config


def own_config(folder: Path) -> dict[str, PretrainedConfig]:
    """Return the config that the library must be given to load a model by its own code.

    With it the library uses the class that ``config_of`` registered; without, it would ask whether
    to trust the folder. Empty for every other model.
    """
    return {"config": config_of(folder)} if runs_code(folder) else {}


def _config_by_own_code(folder: Path) -> PretrainedConfig:
    """Return the config of a model whose own code is allowed, and register its classes.

    Afterwards the library knows the architecture as its own, wherever a model is made of it.

    Raises:
        BadInputError: the code fails, or has no causal language model.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    stated = read_config(folder / "config.json").get("auto_map")
    reference = stated.get(CAUSAL) if isinstance(stated, dict) else None
    if not isinstance(reference, str):
        msg = f"cannot load {folder.name}: auto_map in its config.json names no {CAUSAL}"
        raise BadInputError(msg)
    separate_modules()
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=True
        )
        found = get_class_from_dynamic_module(reference, str(folder), local_files_only=True)
        AutoModelForCausalLM.register(type(config), found, exist_ok=True)
    except Exception as error:  # of code that is not ours
        msg = f"cannot load {folder.name}: its own code fails: {first_line(error)}"
        raise BadInputError(msg) from error
    return config


def check_files(folder: Path) -> None:
    """Reject truncated safetensors files before allocating memory.

    Raises:
        BadInputError: a file is truncated; the message names it.
    """
    for path in weight_files(folder):
        open_weights(path)


def check_shapes(folder: Path, skeleton: PreTrainedModel) -> None:
    """Reject stored tensors whose shape differs from the model's.

    Raises:
        BadInputError: a shape differs; the message names the first such tensors.
    """
    expected_shapes = {name: list(tensor.shape) for name, tensor in skeleton.state_dict().items()}
    mismatches: list[tuple[str, Any, Any]] = []
    for path in weight_files(folder):
        file = open_weights(path)
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            stored = list(file.get_slice(name).get_shape())
            if stored != expected_shapes.get(name, stored):
                mismatches.append((name, stored, expected_shapes[name]))
    check_loaded(folder, {"mismatched_keys": mismatches})


def check_loaded(folder: Path, info: Mapping[str, Any]) -> None:
    """Reject weights that do not match the config, according to the loader's report.

    Raises:
        BadInputError: tensors are missing, unexpected, or of another shape.
    """
    mismatches = sorted(info.get("mismatched_keys") or ())
    shapes = [
        f"{name} as {list(stored)} instead of {list(expected)}"
        for name, stored, expected in mismatches
    ]
    problems = [
        *_listed("lack", info.get("missing_keys") or ()),
        *_listed("also hold", info.get("unexpected_keys") or ()),
        *([f"hold {some(shapes)}"] if shapes else []),
    ]
    if problems:
        raise BadInputError(
            f"the weights in {folder.name} do not match its config.json: they "
            f"{' and '.join(problems)}; {why_unlike(folder)}"
        )


def why_unlike(folder: Path) -> str:
    """Return why a folder's weights may not match its config, and the way out."""
    path = folder / "config.json"
    config = read_config(path) if path.is_file() else {}
    quantisation = config.get("quantization_config")
    if isinstance(quantisation, dict):
        method = str(quantisation.get("quant_method"))[:40]
        return f"they are quantised by {method!r}: give the unquantised model"
    named = config.get("architectures")
    name = str(named[0])[:80] if isinstance(named, list) and named else ""
    if name.endswith("Model") and not name.endswith("LMHeadModel"):
        return f"config.json names {name}, which writes no text: give a model with an output layer"
    return "give the config and the weights of one model"


def check_finite(model: PreTrainedModel) -> None:
    """Reject a model with NaN or infinity in weights or scales of packed weights.

    Raises:
        BadInputError: a value is not finite; the message names the first such tensor.
    """
    for name, parameter in model.named_parameters():
        for tensor in _numbers(parameter):
            if not all(bool(end.isfinite()) for end in torch.aminmax(tensor.detach())):
                msg = f"{name} holds NaN or infinity; train or download the model again"
                raise BadInputError(msg)


def _numbers(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    for part in parts_of(tensor):
        if part.dtype in PLAIN_DTYPES and part.numel() and part.device.type != "meta":
            yield part


def _listed(word: str, names: Collection[str]) -> list[str]:
    listed = sorted(name for name in names if not name.endswith(COMPUTED))
    return [f"{word} {some(listed)}"] if listed else []


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, at most 300 characters."""
    return str(error).strip().split("\n", 1)[0][:300]


# Reads stored tensors into freeable memory instead of mapping their file.
#
# Mapped pages that were read count as the process's memory, which would break memory limits.


STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BYTES_TOO = {**STORED_DTYPES, "U8": torch.uint8}
HEADER_BYTES = struct.Struct("<Q")
Tensors = Mapping[str, torch.Tensor]


def in_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in host memory, pinned if it was on a GPU; a copy is complete."""
    if not tensor.is_cuda:
        return tensor
    return host_empty(tensor.shape, tensor.dtype, is_pinned=True).copy_(tensor)


def check_finite_tensors(tensors: Tensors, prefix: str) -> None:
    """Raise BadInputError for a tensor with NaN or infinity."""
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            msg = f"{prefix}{name} holds NaN or infinity; train or download the model again"
            raise BadInputError(msg)


class StoredTensors:
    """The tensors of a folder's model, each read into separate memory."""

    def __init__(self, folder: Path, dtypes: Mapping[str, torch.dtype] = STORED_DTYPES) -> None:
        """Open the files and read the tensors' positions.

        Raises:
            BadInputError: a tensor's dtype is not in ``dtypes`` (floats of 16 or 32 bits).
        """
        self._places: dict[str, _Place] = {}
        for path in weight_files(folder):
            self._places |= _places(path, dtypes)

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._places)

    def read(self, name: str, room: "Room | None" = None) -> torch.Tensor:
        """Return one tensor, in a buffer of ``room`` if given."""
        place = self._places[name]
        data = room.of(name, place.num_bytes) if room else bytearray(place.num_bytes)
        view = memoryview(data)
        done = 0
        while done < len(data):
            count = os.preadv(place.file, [view[done:]], place.offset + done)
            if not count:
                msg = f"the file of {name} became shorter while it was read; copy it again"
                raise BadInputError(msg)
            done += count
        return torch.frombuffer(data, dtype=place.dtype).reshape(place.shape)


class Room:
    """Reusable read buffers; a read overwrites the previous content.

    New memory is zeroed by the system page by page, which takes as long as reading into it.
    """

    def __init__(self, key: Callable[[str], str]) -> None:
        """``key`` maps tensor names to buffers; names with equal keys share one in turn."""
        self._key = key
        self._held: dict[str, bytearray] = {}

    def of(self, name: str, num_bytes: int) -> bytearray:
        """Return the buffer of a tensor."""
        key = self._key(name)
        if len(self._held.get(key, b"")) != num_bytes:
            self._held[key] = bytearray(num_bytes)
        return self._held[key]


@dataclass(frozen=True)
class _Place:
    file: int
    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def _places(path: Path, dtypes: Mapping[str, torch.dtype]) -> dict[str, _Place]:
    """Return the positions of a file's tensors; safetensors has already validated its header."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # whole tensors are read: no readahead
    length = HEADER_BYTES.unpack(os.pread(file, HEADER_BYTES.size, 0))[0]
    header = json.loads(os.pread(file, length, HEADER_BYTES.size))
    start = HEADER_BYTES.size + length
    places = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in dtypes:
            known = ", ".join(dtypes)
            why = why_unlike(path.parent)
            msg = f"{name} is stored as {entry['dtype']}; layers can be streamed from {known}"
            raise BadInputError(f"{msg}; {why}" if "quantised" in why else msg)
        begin, end = entry["data_offsets"]
        dtype, shape = dtypes[entry["dtype"]], tuple(entry["shape"])
        places[name] = _Place(file, start + begin, end - begin, dtype, shape)
    return places
