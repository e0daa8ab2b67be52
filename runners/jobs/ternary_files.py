"""Model folders with ternary, entropy-coded experts and otherwise plain tensors."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from runners.jobs.runtime import BadInputError

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
class Coded:
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


def encode(symbols: Symbols) -> Coded:
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
    return Coded(np.concatenate(words[::-1]), states.astype(np.uint32), frequencies, count)


def decode(coded: Coded) -> Symbols:
    """Return the symbols of a code.

    Raises:
        CorruptCodeError: words are missing, surplus or changed.
    """
    if coded.frequencies.sum() != TOTAL or len(coded.frequencies) != SYMBOLS:
        raise CorruptCodeError("the frequencies of a ternary code do not add up")
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
            raise CorruptCodeError("a ternary code ends too early")
        states[is_low] = states[is_low] << np.uint64(WORD_BITS) | taken
        at += len(taken)
    if at != len(coded.words) or (states != LOWEST).any():
        raise CorruptCodeError("a ternary code does not end as it was begun")
    return steps.T.reshape(-1)[: coded.count]


def frequencies_of(symbols: Symbols) -> npt.NDArray[np.uint16]:
    """Return each symbol's frequency in parts of 4096, at least 1 if it occurs."""
    counts = np.bincount(symbols.ravel(), minlength=SYMBOLS).astype(np.float64)
    parts = np.maximum(np.rint(counts / counts.sum() * TOTAL), counts > 0).astype(np.int64)
    parts[parts.argmax()] += TOTAL - parts.sum()
    frequencies: npt.NDArray[np.uint16] = parts.astype(np.uint16)
    return frequencies


def _starts(frequencies: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint64]:
    """Return the cumulative frequencies."""
    starts: npt.NDArray[np.uint64] = (np.cumsum(frequencies) - frequencies).astype(np.uint64)
    return starts


# mypy: disable-error-code="no-untyped-call"
# safetensors and transformers ship functions without types.


QUANT_METHOD = "slipway-ternary"
FILE_NAME = "model.safetensors"
WORDS, STATES, PARTS, LEVELS, SHAPE = ".words", ".states", ".parts", ".levels", ".shape"
Tensors = dict[str, torch.Tensor]


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


def tensors_of(name: str, stack: Ternary) -> tuple[Tensors, int]:
    """Return the stored tensors of a stack, verified by decoding, and their bytes.

    Raises:
        CorruptCodeError: decoding yields other symbols.
    """
    symbols: Symbols = stack.symbols.to(torch.uint8).cpu().numpy()
    coded = encode(symbols)
    if not np.array_equal(decode(coded), symbols.ravel()):
        raise CorruptCodeError(f"the code of {name} does not decode to it")
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


def save_ternary(folder: Path, model: PreTrainedModel, coded: Tensors) -> None:
    """Write config and weights: the coded stacks, and every other tensor unchanged."""
    done = {name.removesuffix(WORDS) for name in coded if name.endswith(WORDS)}
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    plain = {
        name: each.detach().cpu().contiguous()
        for name, each in model.state_dict().items()
        if name not in done and name not in tied
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**plain, **coded}, folder / FILE_NAME, {"format": "pt"})
    config = {
        **model.config.to_dict(),
        "quantization_config": {"quant_method": QUANT_METHOD, "stacks": sorted(done)},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))


def is_ternary(folder: Path) -> bool:
    """Return whether ``save_ternary`` wrote a folder."""
    config = json.loads((folder / "config.json").read_text())
    return bool((config.get("quantization_config") or {}).get("quant_method") == QUANT_METHOD)


def load_ternary(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return the folder's model with its experts decoded.

    Raises:
        BadInputError: a code is damaged, or the tensors do not match the config.
    """
    stored = load_file(folder / FILE_NAME)
    stacks = [name.removesuffix(WORDS) for name in stored if name.endswith(WORDS)]
    try:
        weights = {name: _decoded(stored, name).to(dtype) for name in stacks}
    except (CorruptCodeError, KeyError, RuntimeError) as error:
        msg = f"the experts of {folder} are damaged ({error}); copy the folder again"
        raise BadInputError(msg) from error
    endings = (WORDS, STATES, PARTS, LEVELS, SHAPE)
    weights |= {name: each for name, each in stored.items() if not name.endswith(endings)}
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
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
    coded = Coded(
        stored[name + WORDS].numpy().view(np.uint16),
        stored[name + STATES].numpy().view(np.uint32),
        stored[name + PARTS].numpy().view(np.uint16),
        shape.numel(),
    )
    symbols = torch.from_numpy(decode(coded).copy()).view(shape)
    return Ternary(symbols, stored[name + LEVELS]).weight()
