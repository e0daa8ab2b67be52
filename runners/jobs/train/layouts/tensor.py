"""Tensor and sequence parallelism with torch's DTensor, and slices of whole weights."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from runners.jobs.loading import pick_device
from runners.jobs.ranks import Ranks, naming_rank_failures
from runners.jobs.train.layouts.stage import Stage

# Slices of whole weights that ranks hold, and gathering and scattering of whole tensors.
#
# Every layout gathers the same whole tensors, so a checkpoint of one layout resumes another.


class TensorSlice(NamedTuple):
    """A slice of a named tensor: its start and size in each dimension."""

    name: str
    start: tuple[int, ...]
    size: tuple[int, ...]

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the slice as a view of the whole tensor."""
        part = whole
        for dimension, (at, length) in enumerate(zip(self.start, self.size, strict=True)):
            part = part.narrow(dimension, at, length)
        return part

    def rows(self, first: int, count: int) -> "TensorSlice":
        """Return the slice of some of this one's rows."""
        start = (self.start[0] + first, *self.start[1:])
        return TensorSlice(self.name, start, (count, *self.size[1:]))


def whole_slice(name: str, shape: Sequence[int]) -> TensorSlice:
    """Return the slice of a whole tensor."""
    return TensorSlice(name, (0,) * len(shape), tuple(shape))


def share_of(length: int, index: int, count: int) -> tuple[int, int]:
    """Return the first row and the number of rows of share ``index`` of ``length`` rows.

    Shares are divided as by torch.chunk: all as long as the first, except the last ones.
    """
    share = -(-length // count)
    first = min(length, index * share)
    return first, min(length, first + share) - first


class HeldSlice(NamedTuple):
    """A slice and this rank's tensor of it, which shares its memory with the model's."""

    box: TensorSlice
    tensor: nn.Parameter


class Trained(nn.Module):
    """The tensors that a rank's optimizer updates, as parameters under the weights' names."""

    def __init__(self, held: Sequence[HeldSlice]) -> None:
        super().__init__()
        for each in held:
            self.register_parameter(each.box.name.replace(".", "/"), each.tensor)


class Registry:
    """The ranks that hold each slice; every rank has the same registry."""

    def __init__(self, ranks: Ranks, held: Sequence[HeldSlice]) -> None:
        """Exchange the slices with the other ranks."""
        self._ranks = ranks
        self.held = {each.box: each.tensor for each in held}
        slices_by_rank: list[list[TensorSlice]] = [[] for _ in range(ranks.size)]
        with naming_rank_failures(ranks):
            dist.all_gather_object(slices_by_rank, [each.box for each in held])
        holders: dict[TensorSlice, list[int]] = defaultdict(list)
        for rank, boxes in enumerate(slices_by_rank):
            for box in boxes:
                holders[TensorSlice(*box)].append(rank)
        self._holders = dict(sorted(holders.items()))

    def num_holders(self, box: TensorSlice) -> int:
        """Return how many ranks hold the same slice."""
        return len(self._holders[box])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every whole tensor, by name."""
        shapes_by_name: dict[str, tuple[int, ...]] = {}
        for box in self._holders:
            ends = tuple(at + size for at, size in zip(box.start, box.size, strict=True))
            previous = shapes_by_name.get(box.name, (0,) * len(ends))
            shapes_by_name[box.name] = tuple(map(max, previous, ends))
        return shapes_by_name

    def given(self, parts: Mapping[TensorSlice, torch.Tensor]) -> dict[TensorSlice, torch.Tensor]:
        """Return this rank's parts that a gather takes from it, not from another rank."""
        return {
            box: part for box, part in parts.items() if self._holders[box][0] == self._ranks.rank
        }

    def gather(
        self, parts: Mapping[TensorSlice, torch.Tensor], group: dist.ProcessGroup | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the whole tensors on the lead, in host memory; nothing on the others.

        ``parts`` must contain at least those in ``given``.

        Raises:
            RankFailedError: a rank did not send in time.
        """
        lead, me = self._ranks.lead, self._ranks.rank
        whole: dict[str, torch.Tensor] = {}
        if self._ranks.is_lead:
            dtypes = {each.dtype for each in parts.values()} or {torch.float32}
            shapes, dtype = self.shapes, dtypes.pop()
            whole = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        for box, (owner, *_) in self._holders.items():
            if owner == me == lead:
                box.within(whole[box.name]).copy_(parts[box].detach())
            elif owner == me:
                self._ranks.send(parts[box].detach().cpu(), lead, group)
            elif me == lead:
                received = torch.empty(box.size, dtype=whole[box.name].dtype)
                self._ranks.receive(received, owner, group)
                box.within(whole[box.name]).copy_(received)
        return whole

    def scatter(
        self, whole: Mapping[str, torch.Tensor], parts: Mapping[TensorSlice, torch.Tensor]
    ) -> None:
        """Fill every rank's parts from the whole tensors on the lead.

        Raises:
            RankFailedError: a rank did not receive its part in time.
        """
        lead, me = self._ranks.lead, self._ranks.rank
        with torch.no_grad():
            for box, holders in self._holders.items():
                if me == lead:
                    part = box.within(whole[box.name]).contiguous()
                    for rank in holders:
                        if rank == me:
                            parts[box].copy_(part)
                        else:
                            self._ranks.send(part.to(torch.float32), rank)
                elif me in holders:
                    received = torch.empty(box.size, dtype=torch.float32)
                    self._ranks.receive(received, lead)
                    parts[box].copy_(received)

    def norm(self, gradients: Mapping[TensorSlice, torch.Tensor | None]) -> torch.Tensor:
        """Return the norm of the whole gradient, unread; slices on several ranks count once.

        Raises:
            RankFailedError: a rank did not respond in time.
        """
        own_squares = torch.zeros((), dtype=torch.float64, device=pick_device())
        for box, gradient in gradients.items():
            if gradient is not None:
                squares = gradient.float().square().sum().double() / self.num_holders(box)
                own_squares += squares.to(own_squares.device)
        return self._ranks.total_on_device(own_squares).sqrt()


SEQUENCE = 1  # dimension of the length in [rows, length, width]


def divide_matrices(stage: Stage, mesh: DeviceMesh, *, is_sequence_divided: bool) -> None:
    """Shard every matrix of a stage; norms stay whole."""
    between: Placement = Shard(SEQUENCE) if is_sequence_divided else Replicate()
    ends: dict[str, ParallelStyle] = {}
    if hasattr(stage.model, "embed_tokens"):
        ends["model.embed_tokens"] = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=between
        )
    if stage.is_last:
        ends["lm_head"] = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
        if is_sequence_divided:
            ends["model.norm"] = SequenceParallel()
    is_tied = stage.is_last and bool(stage.config.tie_word_embeddings)
    parallelize_module(stage, mesh, ends)
    if is_tied:
        stage.lm_head.weight = stage.model.embed_tokens.weight  # type: ignore[union-attr]  # torch types a submodule as a tensor too
    for block in stage.blocks.values():
        parallelize_module(block, mesh, _block_plan(between))


def _block_plan(between: Placement) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=between),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=between),
    }
    if isinstance(between, Replicate):
        return plan
    return plan | {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
    }


def own_slice(name: str, weight: torch.Tensor) -> TensorSlice:
    """Return the slice of a weight that this rank has on the tensor axis."""
    box = whole_slice(name, weight.shape)
    if not isinstance(weight, DTensor):
        return box
    index, count = weight.device_mesh.get_local_rank(), weight.device_mesh.size()
    for placement in weight.placements:
        if isinstance(placement, Shard):
            at = placement.dim
            size = weight.shape[at] // count
            start = (*box.start[:at], index * size, *box.start[at + 1 :])
            box = TensorSlice(name, start, (*box.size[:at], size, *box.size[at + 1 :]))
    return box


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def plain_gradient(weight: torch.Tensor) -> torch.Tensor | None:
    """Return a weight's gradient with the weight's placements, as a local tensor."""
    gradient = weight.grad
    if isinstance(gradient, DTensor) and isinstance(weight, DTensor):
        gradient = gradient.redistribute(placements=weight.placements)
    return None if gradient is None else plain(gradient)
