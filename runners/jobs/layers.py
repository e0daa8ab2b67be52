"""A causal language model with the weights of one decoder layer at a time in memory.

Embeddings, last norm and output stay in memory; each layer is loaded and dropped in turn, so
that memory is needed for one layer, the embeddings and the text's activations.
"""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from runners.jobs.runtime import BadInputError
from runners.jobs.weights import WeightReader

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
