"""Expert parallelism: each rank has some whole experts; tokens are exchanged by all-to-all.

Source: Lepikhin et al. 2020 (GShard), arXiv:2006.16668, section 3.
"""

# mypy: disable-error-code="no-untyped-call"
# torch's autograd functions are called through an untyped method.

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from runners.jobs.train.autograd import Context
from runners.jobs.train.layouts.stage import Stage
from runners.jobs.train.layouts.tensor import TensorSlice

STACKS = ("gate_up_proj", "down_proj")


class SharedExperts(nn.Module):
    """This rank's experts of a layer; the group has all of them."""

    def __init__(self, whole: Any, group: dist.ProcessGroup) -> None:  # noqa: ANN401 - one class for each architecture
        super().__init__()
        self._group, self._act = group, whole.act_fn
        self._size = dist.get_world_size(group)
        self.num_experts = int(whole.gate_up_proj.shape[0]) // self._size
        self.first = dist.get_rank(group) * self.num_experts
        self.gate_up_proj, self.down_proj = (
            nn.Parameter(getattr(whole, name).detach()[self.first :][: self.num_experts].clone())
            for name in STACKS
        )

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted outputs of the chosen experts for ``hidden`` [tokens, width].

        ``chosen`` and ``weights`` [tokens, experts per token].
        """
        order = chosen.flatten().argsort(stable=True)
        tokens = order // chosen.shape[1]
        counts = chosen.flatten().bincount(minlength=self._size * self.num_experts)
        sent = counts.view(self._size, self.num_experts)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous(), group=self._group)
        out, back = (each.sum(dim=1).tolist() for each in (sent, received))
        arrived = _Travelled.apply(hidden[tokens], out, back, self._group)
        outputs = self._make(arrived, received)
        returned = _Travelled.apply(outputs, back, out, self._group)
        returned = returned * weights.flatten()[order, None]
        return torch.zeros_like(hidden).index_add(0, tokens, returned.to(hidden.dtype))

    def _make(self, arrived: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """Return each token's expert output; tokens are ordered by sender and expert."""
        expert_numbers = torch.arange(self.num_experts, device=arrived.device).repeat(self._size)
        expert_of = expert_numbers.repeat_interleave(received.flatten())
        rows, parts = [], []
        for index in range(self.num_experts):
            rows.append((expert_of == index).nonzero().flatten())
            gated = nn.functional.linear(arrived[rows[-1]], self.gate_up_proj[index])
            gate, up = gated.chunk(2, dim=-1)
            parts.append(nn.functional.linear(self._act(gate) * up, self.down_proj[index]))
        return torch.cat(parts)[torch.cat(rows).argsort()]


class _Travelled(torch.autograd.Function):
    """All-to-all of rows: ``out`` rows to each rank of a group, ``back`` rows from each."""

    @staticmethod
    def forward(
        ctx: Context,
        rows: torch.Tensor,
        out: Sequence[int],
        back: Sequence[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.out, ctx.back, ctx.group = out, back, group
        return _exchanged(rows, out, back, group)

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchanged(gradient, ctx.back, ctx.out, ctx.group), None, None, None


def _exchanged(
    rows: torch.Tensor, out: Sequence[int], back: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    received = rows.new_empty(sum(back), rows.shape[1])
    dist.all_to_all_single(received, rows.contiguous(), list(back), list(out), group=group)
    return received


def divide_experts(stage: Stage, group: dist.ProcessGroup) -> None:
    """Replace every layer's experts by those of this rank."""
    for block in stage.blocks.values():
        sparse: Any = block.mlp
        sparse.experts = SharedExperts(sparse.experts, group)


def expert_boxes(stage: Stage, num_experts: int) -> dict[str, TensorSlice]:
    """Return the slices of this rank's experts, by name."""
    slices = {}
    for name, module in stage.named_modules():
        if isinstance(module, SharedExperts):
            for stack in STACKS:
                inner = tuple(getattr(module, stack).shape[1:])
                at = (module.first, *(0 for _ in inner))
                key = f"{name}.{stack}"
                slices[key] = TensorSlice(key, at, (num_experts // module._size, *inner))  # noqa: SLF001 - of the same file
    return slices
