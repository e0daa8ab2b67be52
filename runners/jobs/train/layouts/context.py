"""Context parallelism: each rank has a piece of every sequence; attention spans all pieces.

Keys and values are all-gathered, or passed around a ring block by block with an online softmax.
Each rank's piece comes from both ends of a sequence, to balance causal attention.
Source: Liu et al. 2023 (Ring Attention), arXiv:2310.01889; Llama 3, arXiv:2407.21783, section
3.3.2, for gathering and for the order of the pieces.
"""

# mypy: disable-error-code="no-untyped-call"
# torch's autograd functions are called through an untyped method.

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from runners.jobs.runtime import BadInputError
from runners.jobs.train.autograd import Context
from runners.jobspec.train import ContextMethod

NAME = "slipway_context"
LENGTH = 2  # dimension of the length in [rows, heads, length, width]


def rank_tokens(length: int, count: int) -> torch.Tensor:
    """Return the tokens of each rank [count, length / count]: one piece from either end.

    Raises:
        BadInputError: the sequence cannot be divided so.
    """
    if length % (2 * count):
        msg = (
            f"sequence_length is {length}, which context_parallel_size {count} does not divide "
            f"into {2 * count} pieces; take a multiple of {2 * count}"
        )
        raise BadInputError(msg)
    pieces = torch.arange(length).view(2 * count, -1)
    return torch.stack(
        [torch.cat([pieces[at], pieces[2 * count - 1 - at]]) for at in range(count)]
    )


def share_sequences(
    model: PreTrainedModel, method: ContextMethod, group: dist.ProcessGroup
) -> None:
    """Switch the model to attention over the keys and values of all ranks of the group."""
    route_attention(method, group)
    model.config._attn_implementation = NAME  # noqa: SLF001 - it has no public name


def route_attention(method: ContextMethod, group: dist.ProcessGroup) -> None:
    """Register context-parallel attention over this group."""
    attend = ring_attention if method == "ring" else gathered_attention

    def attention(
        module: Any,  # noqa: ANN401 - one class for each architecture
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        scaling: float,
        **_others: object,
    ) -> tuple[torch.Tensor, None]:
        groups = int(module.num_key_value_groups)
        output = attend(query * scaling, key, value, mask, groups, group)
        return output.transpose(1, 2), None

    AttentionInterface.register(NAME, attention)


def gathered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    groups: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Return the attention of [rows, heads, length, width] queries over all ranks' keys."""
    both: torch.Tensor = _Gathered.apply(torch.stack([key, value]), group)
    keys, values = (each.repeat_interleave(groups, dim=1) for each in both)
    scores = (query @ keys.transpose(2, 3)).float() + mask
    output: torch.Tensor = nn.functional.softmax(scores, dim=-1).to(values.dtype) @ values
    return output


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    groups: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Return the same, with blocks of keys and values that are passed around the ranks."""
    index, count = dist.get_rank(group), dist.get_world_size(group)
    block = key.shape[LENGTH]
    both = torch.stack([key, value])
    highest = torch.full((*query.shape[:-1], 1), torch.finfo(torch.float32).min).to(query.device)
    total = torch.zeros_like(highest)
    output = torch.zeros_like(query, dtype=torch.float32)
    for hop in range(count):
        keys, values = (each.repeat_interleave(groups, dim=1) for each in both)
        at = (index - hop) % count * block
        scores = (query @ keys.transpose(2, 3)).float() + mask[..., at : at + block]
        new_highest = torch.maximum(highest, scores.detach().amax(dim=-1, keepdim=True))
        rescale, weights = torch.exp(highest - new_highest), torch.exp(scores - new_highest)
        total = total * rescale + weights.sum(dim=-1, keepdim=True)
        output = output * rescale + weights @ values.float()
        highest = new_highest
        if hop < count - 1:
            both = _Passed.apply(both, group)
    return (output / total).to(value.dtype)


class _Gathered(torch.autograd.Function):
    """All-gather of the ranks' pieces [2, rows, heads, length, width] along the length."""

    @staticmethod
    def forward(ctx: Context, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        pieces = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, own.contiguous(), group=group)
        return torch.cat(pieces, dim=LENGTH + 1)

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        count, own = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        summed = gradient.contiguous()
        dist.all_reduce(summed, group=ctx.group)
        return summed.chunk(count, dim=LENGTH + 1)[own].contiguous(), None


class _Passed(torch.autograd.Function):
    """Send a block to the next rank, and receive the previous rank's block."""

    @staticmethod
    def forward(ctx: Context, block: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _passed(block, group, 1)

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _passed(gradient, ctx.group, -1), None


def _passed(block: torch.Tensor, group: dist.ProcessGroup, step: int) -> torch.Tensor:
    index, count = dist.get_rank(group), dist.get_world_size(group)
    to, origin = ((index + each) % count for each in (step, -step))
    received = torch.empty_like(block)
    sending = dist.isend(block.contiguous(), group=group, group_dst=to)
    dist.recv(received, group=group, group_src=origin)
    if sending is not None:
        sending.wait()
    return received
