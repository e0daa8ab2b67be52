"""Fold input scales of linear layers into the preceding module without changing the output.

Each input channel is divided by its scale in the module that computes it (a norm's weight, another
linear layer's rows), and the weight columns that read it are multiplied by the scale.
"""

from dataclasses import dataclass

import torch

from runners.jobs.compress.statistics import InputStatistics
from runners.jobs.runtime import BadInputError

Linears = dict[str, torch.nn.Linear]
LayerStatistics = dict[str, InputStatistics]
# Model types whose norms multiply by their weight, with the layer names below.
FOLDABLE = ("llama", "mistral", "qwen2", "qwen3")
NORM_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
LINEAR_READERS = {"self_attn.v_proj": ("self_attn.o_proj",), "mlp.up_proj": ("mlp.down_proj",)}
LEAST_SCALE = 1e-4


@dataclass(frozen=True)
class Fold:
    """A module that computes inputs, and the names of the linear layers that read them."""

    maker: torch.nn.Module
    readers: tuple[str, ...]


def check_shape_known(model_type: str, what_is_done_to: str) -> None:
    """Raise BadInputError for a model type whose layer structure is not supported."""
    if model_type not in FOLDABLE:
        msg = (
            f"{what_is_done_to} {', '.join(FOLDABLE)} layers, and this model is of type "
            f"'{model_type}'; choose gptq or quantease for it"
        )
        raise BadInputError(msg)


def folds_of(layer: torch.nn.Module, *, between_linears: bool) -> list[Fold]:
    """Return a layer's folds; with ``between_linears``, also those between two linear layers.

    With grouped-query attention, v_proj is not folded: several query heads read each output.
    """
    names = NORM_READERS | (LINEAR_READERS if between_linears else {})
    folds = [Fold(layer.get_submodule(maker), readers) for maker, readers in names.items()]
    return [
        fold
        for fold in folds
        if _shape(fold.maker)[0] == _shape(layer.get_submodule(fold.readers[0]))[1]
    ]


def fold_scales(fold: Fold, linears: Linears, seen: LayerStatistics, scales: torch.Tensor) -> None:
    """Divide the fold's inputs by ``scales`` and multiply the columns that read them, in place."""
    _divide(fold.maker, scales)
    for name in fold.readers:
        weight = linears[name].weight
        weight.data = (weight.data.float() * scales).to(weight.dtype)
        seen[name].divide(scales)


def _divide(maker: torch.nn.Module, scales: torch.Tensor) -> None:
    for parameter in maker.parameters():  # of a norm: weight; of a linear layer: weight and bias
        divisor = scales[:, None] if parameter.dim() > 1 else scales
        parameter.data = (parameter.data.float() / divisor).to(parameter.dtype)


def _shape(module: torch.nn.Module) -> torch.Size:
    return next(module.parameters()).shape
