"""Models on the meta device, and readers of their weights under the library's names.

Folders store each expert of a sparse layer as separate tensors, with other names for Mixtral;
the library stacks a layer's experts into one tensor.
"""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
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
    """The weights of one expert: stacked gate and up projections, and down projection."""

    gate_up: torch.Tensor
    down: torch.Tensor


class ModelTensors:
    """A folder's tensors by the model's names; experts individually or stacked."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Open the files.

        Raises:
            BadInputError: a tensor's dtype is not a float of 16 or 32 bits.
        """
        self._files = StoredTensors(folder)
        self._device, self._dtype = device, dtype
        self._plain: dict[str, str] = {}
        self.experts: dict[str, dict[int, Roles]] = defaultdict(dict)  # place -> expert -> roles
        for stored in self._files.names:
            name = stored.replace(".block_sparse_moe.", ".mlp.")
            match = EXPERT_TENSOR.match(name)
            if match and match["word"] in ROLES:
                roles = self.experts[match["place"]].setdefault(int(match["expert"]), {})
                roles[ROLES[match["word"]]] = stored
            else:
                self._plain[name] = stored

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors, including stacked experts."""
        stacks = [f"{place}.{stack}" for place in self.experts for stack in (GATE_UP, DOWN)]
        return [*self._plain, *stacks]

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the device.

        Raises:
            BadInputError: it has NaN or infinity.
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
        """Return one expert of the layer named ``place``, on the device."""
        roles = self.experts[place][index]
        gate, up, down = (self._read(roles[role]) for role in ("gate", "up", "down"))
        return Expert(torch.cat([gate, up]), down)

    def _read(self, stored: str) -> torch.Tensor:
        return self._files.read(stored).to(self._device, self._dtype)


def skeleton(config: PretrainedConfig, dtype: torch.dtype, folder: Path | None) -> PreTrainedModel:
    """Return a model of the config on the meta device, for inference."""
    is_classifier = config.model_type in ENCODERS
    kind = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    from accelerate import init_empty_weights  # jobs on one device do without it

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
    """Load weights into a model or module; ``read`` returns each by its name there.

    Raises:
        BadInputError: weights are missing or do not match the config.
    """
    tensors = {name: read(name) for name in names}
    try:
        unknown = model.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
    except RuntimeError as error:  # a shape differs from the config's
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
