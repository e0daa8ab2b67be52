"""Pruning: by magnitude, Wanda, SparseGPT, and whole heads and channels (LLM-Pruner)."""

from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PretrainedConfig, PreTrainedModel

from runners.jobs.compress.quantization import BLOCK_COLUMNS, DAMPING, inverse_factor
from runners.jobs.runtime import BadInputError
from runners.jobspec.compress import PATTERN_BLOCK

Pattern = Literal["unstructured", "2:4"]
BLOCK = PATTERN_BLOCK
KEPT_PER_BLOCK = 2


def magnitude(weight: torch.Tensor, sparsity: float, pattern: Pattern) -> torch.Tensor:
    """Set the smallest weights to zero, ranked over the whole matrix."""
    scores = weight.float().abs()
    if pattern == "2:4":
        return weight * two_of_four(scores)
    count = round(sparsity * scores.numel())
    dropped = torch.topk(scores.flatten(), count, largest=False).indices
    pruned = weight.flatten().clone()
    pruned[dropped] = 0
    return pruned.view_as(weight)


def wanda(
    weight: torch.Tensor, norms: torch.Tensor, sparsity: float, pattern: Pattern
) -> torch.Tensor:
    """Set the weights of smallest |weight| x input norm in each row to zero."""
    scores = weight.float().abs() * norms.float()[None, :]
    if pattern == "2:4":
        return weight * two_of_four(scores)
    count = round(sparsity * scores.shape[1])
    dropped = torch.topk(scores, count, dim=1, largest=False).indices
    return weight.scatter(1, dropped, 0.0)


def two_of_four(scores: torch.Tensor) -> torch.Tensor:
    """Return a mask that keeps the two highest of every four consecutive scores of a row.

    Raises:
        ValueError: the row length is no multiple of 4.
    """
    rows, columns = scores.shape
    if columns % BLOCK:
        msg = f"rows of {columns} weights do not divide into blocks of {BLOCK}"
        raise ValueError(msg)
    blocks = scores.view(rows, -1, BLOCK)
    kept = torch.topk(blocks, KEPT_PER_BLOCK, dim=2).indices
    mask = torch.zeros_like(blocks, dtype=torch.bool).scatter(2, kept, value=True)
    return mask.view(rows, columns)


# SparseGPT: prune block by block and compensate the error in the remaining columns.
#
# Source: Frantar and Alistarh 2023, arXiv:2301.00774, algorithm 1.


def sparsegpt(
    weight: torch.Tensor,
    gram: torch.Tensor,
    sparsity: float,
    pattern: Pattern,
    damping: float = DAMPING,
) -> torch.Tensor:
    """Prune a matrix to the pattern with least output error on the text of ``gram``.

    Unstructured pruning removes the share ``sparsity`` from each block of 128 columns.

    Raises:
        ValueError: the pattern is 2:4 and the row length is no multiple of 4.
    """
    remaining = weight.float().clone()
    remaining[:, gram.diagonal() == 0] = 0.0
    factor = inverse_factor(gram, damping)
    columns = remaining.shape[1]
    if pattern == "2:4" and columns % BLOCK:
        two_of_four(remaining)
    for begin in range(0, columns, BLOCK_COLUMNS):
        end = min(begin + BLOCK_COLUMNS, columns)
        saliency = _saliency(remaining[:, begin:end], factor[begin:end, begin:end])
        mask = _keep_mask(saliency, sparsity, pattern)
        errors = torch.zeros(len(remaining), end - begin, device=remaining.device)
        for column in range(begin, end):
            at = column - begin
            if pattern == "2:4" and at % BLOCK == 0:
                four = slice(column, column + BLOCK)
                mask[:, at : at + BLOCK] = two_of_four(
                    _saliency(remaining[:, four], factor[four, four])
                )
            pruned = torch.where(mask[:, at], remaining[:, column], 0.0)
            error = (remaining[:, column] - pruned) / factor[column, column]
            remaining[:, column + 1 : end] -= (
                error[:, None] * factor[column, column + 1 : end][None]
            )
            remaining[:, column] = pruned
            errors[:, at] = error
        remaining[:, end:] -= errors @ factor[begin:end, end:]
    return remaining.to(weight.dtype)


def _saliency(block: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return block.square() / factor.diagonal().square()[None, :]


def _keep_mask(saliency: torch.Tensor, sparsity: float, pattern: Pattern) -> torch.Tensor:
    if pattern == "2:4":
        return torch.ones_like(saliency, dtype=torch.bool)
    count = round(sparsity * saliency.numel())
    mask = torch.ones(saliency.numel(), dtype=torch.bool, device=saliency.device)
    mask[torch.topk(saliency.flatten(), count, largest=False).indices] = False
    return mask.view_as(saliency)


# LLM-Pruner: remove whole heads and feed-forward channels, the same number in each layer.
#
# Coupled weights are removed together: a channel is a row of gate_proj and up_proj and a column of
# down_proj; query heads are removed with their shared key-value head. The importance of a group is
# the sum of |weight x gradient| over it on calibration text. All layers have the same shape, so
# any engine loads the folder. Source: Ma et al. 2023, arXiv:2305.11627, sections 3.1 and 3.2
# (element-wise, first order).


CHANNEL_MULTIPLE = 32  # for kernels and quantisation groups
Scores = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PrunedSizes:
    """Channels and key-value heads kept in each layer."""

    channels: int
    key_value_heads: int


def pruned_sizes(config: PretrainedConfig, share: float) -> PrunedSizes:
    """Return the sizes kept when about ``share`` of heads and channels is removed.

    Raises:
        BadInputError: the share rounds to removing nothing.
    """
    channels, heads = int(config.intermediate_size), key_value_heads(config)
    multiple = min(CHANNEL_MULTIPLE, channels)
    sizes = PrunedSizes(
        max(multiple, round(channels * (1 - share) / multiple) * multiple),
        max(1, round(heads * (1 - share))),
    )
    if sizes == PrunedSizes(channels, heads):
        msg = (
            f"sparsity {share:g} removes nothing of {channels} channels (in steps of {multiple}) "
            f"and {heads} heads of keys; choose a larger share"
        )
        raise BadInputError(msg)
    return sizes


def taylor_scores(model: PreTrainedModel, calibration: torch.Tensor, at_once: int) -> Scores:
    """Return |weight x gradient| of every layer matrix; clear the gradients afterwards."""
    matrices = {n: p for n, p in model.named_parameters() if n.endswith("_proj.weight")}
    model.zero_grad(set_to_none=True)
    with torch.enable_grad():
        for ids in torch.split(calibration, at_once):
            model(ids, labels=ids, use_cache=False).loss.backward()
    scores = {
        name: (each.detach() * each.grad).abs()
        for name, each in matrices.items()
        if each.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return scores


@torch.no_grad()
def prune(model: PreTrainedModel, scores: Scores, sizes: PrunedSizes) -> None:
    """Prune the model and its config to the groups of highest score, in place."""
    config = model.config
    heads, groups = int(config.num_attention_heads), key_value_heads(config)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    for prefix, layer in _layers(model):
        own = {n.removeprefix(prefix): each for n, each in scores.items() if n.startswith(prefix)}
        _cut_channels(layer, own, sizes.channels)
        _cut_heads(layer, own, (groups, heads // groups, head_dim), sizes.key_value_heads)
    config.head_dim = head_dim
    config.intermediate_size = sizes.channels
    config.num_key_value_heads = sizes.key_value_heads
    config.num_attention_heads = sizes.key_value_heads * (heads // groups)


def _cut_channels(layer: torch.nn.Module, scores: Scores, count: int) -> None:
    gate, up, down = (scores[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    kept = _highest(gate.sum(dim=1) + up.sum(dim=1) + down.sum(dim=0), count)
    for name in ("gate", "up"):
        keep_slices(layer, f"mlp.{name}_proj", kept, 0)
    keep_slices(layer, "mlp.down_proj", kept, 1)


def _cut_heads(
    layer: torch.nn.Module, scores: Scores, shape: tuple[int, int, int], count: int
) -> None:
    groups, queries, head_dim = shape
    q, k, v = (scores[f"self_attn.{name}_proj.weight"].sum(dim=1) for name in "qkv")
    o = scores["self_attn.o_proj.weight"].sum(dim=0)
    kept = _highest(
        torch.stack([each.view(groups, -1).sum(dim=1) for each in (q, k, v, o)]).sum(dim=0), count
    )
    shared = group_indices(kept, head_dim)
    own = group_indices(kept, queries * head_dim)
    for name, places, side in (("q", own, 0), ("k", shared, 0), ("v", shared, 0), ("o", own, 1)):
        keep_slices(layer, f"self_attn.{name}_proj", places, side)


def keep_slices(layer: torch.nn.Module, name: str, places: torch.Tensor, side: int) -> None:
    """Keep some rows (side 0, with their bias) or columns (side 1) of a linear layer."""
    linear = layer.get_submodule(name)
    assert isinstance(linear, torch.nn.Linear)  # noqa: S101 - the names are those of the scores
    linear.weight = torch.nn.Parameter(linear.weight.index_select(side, places).contiguous())
    if side == 0 and linear.bias is not None:
        linear.bias = torch.nn.Parameter(linear.bias.index_select(0, places))
    linear.out_features, linear.in_features = linear.weight.shape


def _highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    return torch.topk(scores, count).indices.sort().values


def group_indices(groups: torch.Tensor, width: int) -> torch.Tensor:
    """Return the element indices of the given groups of ``width`` elements."""
    return (groups[:, None] * width + torch.arange(width, device=groups.device)).flatten()


def _layers(model: PreTrainedModel) -> list[tuple[str, torch.nn.Module]]:
    count = int(model.config.num_hidden_layers)
    return [
        (f"model.layers.{at}.", model.get_submodule(f"model.layers.{at}")) for at in range(count)
    ]


def key_value_heads(config: PretrainedConfig) -> int:
    """Return the number of key-value heads; without GQA, the number of attention heads."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
