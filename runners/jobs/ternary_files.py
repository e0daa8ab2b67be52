"""Model folders with ternary, entropy-coded experts and otherwise plain tensors.

Names are those of the model's parameters: experts are stacked, as in memory.
"""

# mypy: disable-error-code="no-untyped-call"
# safetensors and transformers ship functions without types.

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from runners.jobs.entropy_code import Coded, CorruptCodeError, Symbols, decode, encode
from runners.jobs.runtime import BadInputError

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
