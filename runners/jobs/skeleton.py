"""Models on the meta device, and models with one decoder layer at a time in memory."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from runners.jobs.runtime import BadInputError
from runners.jobs.weights import StoredTensors, WeightReader, check_finite_tensors
from runners.jobspec.base import ENCODERS

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.


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
        check_finite_tensors({name: tensor}, "")
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


# A causal language model with the weights of one decoder layer at a time in memory.
#
# Embeddings, last norm and output stay in memory; each layer is loaded and dropped in turn, so
# that memory is needed for one layer, the embeddings and the text's activations.


# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.


SEQUENCES_AT_ONCE = 4
Hidden = torch.Tensor
Extra = Mapping[str, Any]  # a layer's arguments besides the hidden states


class LayerwiseModel:
    """The skeleton of a model folder, the names of its layers' weights, and their reader."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Load everything except the decoder layers.

        Raises:
            BadInputError: the architecture is not supported, or config and weights do not match.
        """
        self.config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        with init_empty_weights(include_buffers=False):
            self.model: PreTrainedModel = AutoModelForCausalLM.from_config(
                self.config, dtype=dtype
            )
        self.device = device
        self.dtype = dtype
        self.layers, self.prefix = _decoder_layers(self.model)
        self.reader = WeightReader(folder, self.model)
        torch.nn.Module.eval(self.model)
        around = {name: self.read(name) for name in self.names_around()}
        self.model.load_state_dict(around, strict=False, assign=True)
        self.model.tie_weights()
        for name, buffer in list(self.model.named_buffers()):
            owner, _, last = name.rpartition(".")
            setattr(self.model.get_submodule(owner), last, buffer.to(device))

    def names_around(self) -> list[str]:
        """Return the names of stored tensors outside of the decoder layers."""
        return [name for name in self.reader.names if not name.startswith(f"{self.prefix}.")]

    def name_of(self, index: int, name: str) -> str:
        """Return the full name of a layer's tensor or module."""
        return f"{self.prefix}.{index}.{name}"

    def load_layer(self, index: int) -> torch.nn.Module:
        """Return the layer with its weights."""
        layer = self.layers[index]
        own = f"{self.prefix}.{index}."
        names = [name for name in self.reader.names if name.startswith(own)]
        tensors = {name.removeprefix(own): self.read(name) for name in names}
        layer.load_state_dict(tensors, strict=False, assign=True)
        return layer

    def drop_layer(self, index: int) -> None:
        """Free the layer's weights."""
        torch.nn.Module.to(self.layers[index], "meta")

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> tuple[Hidden, list[Extra]]:
        """Return the first layer's inputs, and the other arguments of each layer.

        ``ids`` [sequences, tokens] have one length, so the arguments of the first apply.
        """
        calls: list[tuple[Hidden, Extra]] = []

        def pass_on(hidden: Hidden, **extra: Any) -> Hidden:
            calls.append((hidden, extra))
            return hidden

        with self._layers_as(pass_on):
            for row in ids.split(1):
                self.model(row.to(self.device), use_cache=False, logits_to_keep=1)
        count = len(self.layers)
        return torch.cat([hidden for hidden, _ in calls[::count]]), [
            extra for _, extra in calls[:count]
        ]

    @torch.no_grad()
    def run(self, index: int, hidden: Hidden, extra: Extra) -> Hidden:
        """Return the loaded layer's outputs for all sequences."""
        layer = self.layers[index]
        outputs = [layer(some, **extra) for some in hidden.split(SEQUENCES_AT_ONCE)]
        return torch.cat([each[0] if isinstance(each, tuple) else each for each in outputs])

    @torch.no_grad()
    def logits(self, hidden: Hidden, ids: torch.Tensor, keep: int) -> torch.Tensor:
        """Return the logits of the last ``keep`` positions from the last layer's outputs."""
        with self._layers_as(lambda _given, **_extra: hidden):
            output = self.model(ids.to(self.device), use_cache=False, logits_to_keep=keep)
        values: torch.Tensor = output.logits
        return values

    @torch.no_grad()
    def enter(self, **call: Any) -> tuple[Hidden, list[Extra]]:
        """Return the first layer's inputs in a model call, and the layers' other arguments."""
        calls: list[tuple[Hidden, Extra]] = []

        def pass_on(hidden: Hidden, **extra: Any) -> Hidden:
            calls.append((hidden, extra))
            return hidden

        with self._layers_as(pass_on):
            self.model.base_model(**call)
        return calls[0][0], [extra for _, extra in calls]

    def linears(self, index: int) -> dict[str, torch.nn.Linear]:
        """Return the layer's linear modules by their names within it."""
        modules = self.layers[index].named_modules()
        return {name: each for name, each in modules if isinstance(each, torch.nn.Linear)}

    @contextmanager
    def _layers_as(self, function: Callable[..., Hidden]) -> Iterator[None]:
        for layer in self.layers:
            vars(layer)["forward"] = function
        try:
            yield
        finally:
            for layer in self.layers:
                del vars(layer)["forward"]

    def read(self, name: str) -> torch.Tensor:
        """Return a stored tensor on the device, in the model's dtype."""
        return self.reader.read(name).to(self.device, self.dtype)


def _decoder_layers(model: PreTrainedModel) -> tuple[torch.nn.ModuleList, str]:
    count = int(model.config.num_hidden_layers)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module, name
    msg = f"a '{model.config.model_type}' model has no list of {count} decoder layers"
    raise BadInputError(msg)
