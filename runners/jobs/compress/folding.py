"""Move the scales of a linear layer's inputs into what stands before it: the layer's output stays.

Each input is divided by its scale where it is made (a norm's weight, another linear layer's rows)
and each column that reads it is multiplied, so that rounding sees other columns.
"""

from dataclasses import dataclass

import torch

from runners.jobs.compress.statistics import InputStatistics
from runners.jobs.runtime import BadInputError

Linears = dict[str, torch.nn.Linear]
Seen = dict[str, InputStatistics]
# Model types whose norms multiply by their weight and whose layers have the names below.
FOLDABLE = ("llama", "mistral", "qwen2", "qwen3")
NORM_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
LINEAR_READERS = {"self_attn.v_proj": ("self_attn.o_proj",), "mlp.up_proj": ("mlp.down_proj",)}
LEAST_SCALE = 1e-4


@dataclass(frozen=True)
class Fold:
    """What makes some inputs, and the linear layers that read them, by name."""

    maker: torch.nn.Module
    readers: tuple[str, ...]


def check_shape_known(model_type: str, what_is_done_to: str) -> None:
    """Raise BadInputError for a model whose layers are built in another way."""
    if model_type not in FOLDABLE:
        msg = (
            f"{what_is_done_to} {', '.join(FOLDABLE)} layers, and this model is of type "
            f"'{model_type}'; choose gptq or quantease for it"
        )
        raise BadInputError(msg)


def folds_of(layer: torch.nn.Module, *, between_linears: bool) -> list[Fold]:
    """Return a layer's folds; ``between_linears`` also those that no norm stands before.

    With fewer heads of keys than of queries an output of v_proj is read at several places: then
    it stays as it is.
    """
    names = NORM_READERS | (LINEAR_READERS if between_linears else {})
    folds = [Fold(layer.get_submodule(maker), readers) for maker, readers in names.items()]
    return [
        fold
        for fold in folds
        if _shape(fold.maker)[0] == _shape(layer.get_submodule(fold.readers[0]))[1]
    ]


def fold_scales(fold: Fold, linears: Linears, seen: Seen, scales: torch.Tensor) -> None:
    """Divide the fold's inputs by ``scales`` and multiply the columns that read them, in place."""
    _divide(fold.maker, scales)
    for name in fold.readers:
        weight = linears[name].weight
        weight.data = (weight.data.float() * scales).to(weight.dtype)
        seen[name].divide(scales)


def _divide(maker: torch.nn.Module, scales: torch.Tensor) -> None:
    for parameter in maker.parameters():  # a norm's weight, or a linear layer's weight and bias
        by = scales[:, None] if parameter.dim() > 1 else scales
        parameter.data = (parameter.data.float() / by).to(parameter.dtype)


def _shape(module: torch.nn.Module) -> torch.Size:
    return next(module.parameters()).shape
