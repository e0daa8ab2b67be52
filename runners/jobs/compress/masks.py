"""Learnable pruning masks over layers, heads, hidden units and channels.

Each mask is a hard concrete variable. Lagrange multipliers constrain the expected number of kept
units to the target, which ramps from the full shape. Sources: Louizos et al. 2017,
arXiv:1712.01312, section 2.2; Xia et al. 2023 (Sheared LLaMA), arXiv:2310.06694, section 2.1.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from runners.shear_options import Shape

TEMPERATURE, LOW, HIGH = 0.83, -0.1, 1.1
FIRST_LOGIT = 2.5  # initially nearly everything is kept
FIRST_NOISE = 0.01
NEARLY_ONE = 1.0 - 1e-6
DIMENSIONS = ("layers", "hidden", "heads", "channels")
Values = Mapping[str, torch.Tensor]


class Masks(torch.nn.Module):
    """Logits per layer, per hidden unit, and per key-value head and channel of each layer."""

    def __init__(self, full: Shape, seed: int) -> None:
        """Initialise the logits so that nearly everything is kept."""
        super().__init__()
        self.full = full
        random = torch.Generator().manual_seed(seed)
        sizes = {
            "layers": (full.layers,),
            "hidden": (full.hidden_size,),
            "heads": (full.layers, full.key_value_heads),
            "channels": (full.layers, full.intermediate_size),
        }
        self.logits = torch.nn.ParameterDict(
            {
                name: FIRST_LOGIT + FIRST_NOISE * torch.randn(size, generator=random)
                for name, size in sizes.items()
            }
        )
        self.linear = torch.nn.ParameterDict({name: torch.zeros(()) for name in sizes})
        self.quadratic = torch.nn.ParameterDict({name: torch.zeros(()) for name in sizes})

    def draw(self) -> Values:
        """Sample mask values in [0, 1] from the hard concrete distribution."""
        values = {}
        for name, logit in self.logits.items():
            chance = torch.rand_like(logit).clamp(1 - NEARLY_ONE, NEARLY_ONE)
            noise = chance.log() - (1 - chance).log()
            stretched = torch.sigmoid((noise + logit) / TEMPERATURE) * (HIGH - LOW) + LOW
            values[name] = stretched.clamp(0, 1)
        return values

    def shares(self) -> Values:
        """Return the expected kept share per dimension; for heads and channels, per layer."""
        shift = TEMPERATURE * math.log(-LOW / HIGH)
        return {name: torch.sigmoid(each - shift).mean(-1) for name, each in self.logits.items()}

    def penalty(self, target: Shape, ramp: float) -> torch.Tensor:
        """Return the Lagrangian penalty on the gap between expected and target shape.

        ``ramp`` from 0 to 1 moves the target from the full shape to ``target``.
        """
        total = torch.zeros(())
        for name, share in self.shares().items():
            target_share = 1.0 - ramp * (1.0 - target.size(name) / self.full.size(name))
            gap = share - target_share
            total = total + (self.linear[name] * gap + self.quadratic[name] * gap**2).sum()
        return total

    def kept(self, target: Shape) -> dict[str, torch.Tensor]:
        """Return the sorted indices of the highest logits per dimension: the units to keep."""
        return {
            name: self.logits[name].detach().topk(target.size(name)).indices.sort(-1).values
            for name in DIMENSIONS
        }


@contextmanager
def masked(model: PreTrainedModel, values: Values) -> Iterator[None]:
    """Apply mask values to a model's activations inside the block."""
    handles = [
        model.get_input_embeddings().register_forward_hook(_scaled_output(values["hidden"]))
    ]
    for at, layer in enumerate(model.get_submodule("model.layers").children()):
        outputs = values["hidden"] * values["layers"][at]
        attention = layer.get_submodule("self_attn.o_proj")
        down = layer.get_submodule("mlp.down_proj")
        width = attention.get_parameter("weight").shape[1] // len(values["heads"][at])
        inputs = (values["heads"][at].repeat_interleave(width), values["channels"][at])
        for module, scale in zip((attention, down), inputs, strict=True):
            handles.append(module.register_forward_pre_hook(_scaled_input(scale)))
            handles.append(module.register_forward_hook(_scaled_output(outputs)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _scaled_input(scale: torch.Tensor) -> Any:  # noqa: ANN401 - a hook's signature is torch's
    return lambda _module, given: (given[0] * scale,)


def _scaled_output(scale: torch.Tensor) -> Any:  # noqa: ANN401 - a hook's signature is torch's
    return lambda _module, _given, output: output * scale
