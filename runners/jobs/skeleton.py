"""A model without weights, and its weights by the names that the library gives them.

Folders keep each expert of a sparse layer as tensors of its own, and Mixtral calls them by other
words; the library stacks the experts of a layer into one tensor.
"""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from runners.classification import ENCODERS
from runners.jobs.runtime import BadInputError
from runners.jobs.stored import StoredTensors, check_finite

EXPERT_TENSOR = re.compile(r"^(?P<place>.+\.experts)\.(?P<expert>\d+)\.(?P<word>\w+)\.weight$")
ROLES = {
    "w1": "gate", "w3": "up", "w2": "down",
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
}  # fmt: skip
GATE_UP, DOWN = "gate_up_proj", "down_proj"
SHOWN = 3
Roles = dict[str, str]  # gate, up, down -> the stored tensor's name


class Expert(NamedTuple):
    """The weights of one expert: its gate over its up projection, and its down projection."""

    gate_up: torch.Tensor
    down: torch.Tensor


class ModelTensors:
    """A folder's tensors by the model's own names; experts one by one or stacked."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Open the files.

        Raises:
            BadInputError: a tensor is stored as something else than a float of 16 or 32 bits.
        """
        self._files = StoredTensors(folder)
        self._device, self._dtype = device, dtype
        self._plain: dict[str, str] = {}
        self.experts: dict[str, dict[int, Roles]] = defaultdict(dict)  # place -> expert -> roles
        for stored in self._files.names:
            name = stored.replace(".block_sparse_moe.", ".mlp.")
            found = EXPERT_TENSOR.match(name)
            if found and found["word"] in ROLES:
                roles = self.experts[found["place"]].setdefault(int(found["expert"]), {})
                roles[ROLES[found["word"]]] = stored
            else:
                self._plain[name] = stored

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors, stacked experts among them."""
        stacks = [f"{place}.{stack}" for place in self.experts for stack in (GATE_UP, DOWN)]
        return [*self._plain, *stacks]

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the device.

        Raises:
            BadInputError: it holds NaN or infinity.
        """
        if name in self._plain:
            tensor = self._read(self._plain[name])
        else:
            place, _, which = name.rpartition(".")
            experts = [self.expert(place, index) for index in range(len(self.experts[place]))]
            tensor = torch.stack([one.down if which == DOWN else one.gate_up for one in experts])
        check_finite({name: tensor}, "")
        return tensor

    def expert(self, place: str, index: int) -> Expert:
        """Return one expert of the layer at ``place`` on the device."""
        roles = self.experts[place][index]
        gate, up, down = (self._read(roles[role]) for role in ("gate", "up", "down"))
        return Expert(torch.cat([gate, up]), down)

    def _read(self, stored: str) -> torch.Tensor:
        return self._files.read(stored).to(self._device, self._dtype)


def skeleton(config: PretrainedConfig, dtype: torch.dtype, folder: Path | None) -> PreTrainedModel:
    """Return a model of the config whose weights take no memory, to be run and not trained."""
    is_classifier = config.model_type in ENCODERS
    kind = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = kind.from_config(config, dtype=dtype)
    if folder is not None and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder))
    torch.nn.Module.eval(model)
    return model


def fill(
    model: nn.Module,
    names: Iterable[str],
    read: Callable[[str], torch.Tensor],
    device: torch.device,
) -> None:
    """Give the model, or a part of one, its weights: ``read`` returns each by its name there.

    Raises:
        BadInputError: some are missing, or are not those of the config.
    """
    tensors = {name: read(name) for name in names}
    try:
        unknown = model.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
    except RuntimeError as error:  # a shape that is not the config's
        raise _mismatch(str(error).strip().splitlines()[-1].strip()) from error
    if isinstance(model, PreTrainedModel):
        model.tie_weights()
    missing = [name for name, each in model.named_parameters() if each.is_meta]
    for names_, word in ((missing, "lack"), (unknown, "also hold")):
        if names_:
            raise _mismatch(f"they {word} {', '.join(names_[:SHOWN])}")
    for name, buffer in list(model.named_buffers()):
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, buffer.to(device))


def _mismatch(what: str) -> BadInputError:
    return BadInputError(
        f"the weights do not match config.json: {what}; give the config and the weights of one "
        "model"
    )
