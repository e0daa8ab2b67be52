"""What a rank holds of each weight, as a box in the whole tensor; and the whole from the boxes.

Boxes of any layout make the same whole tensors, so that a checkpoint of one resumes another.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from runners.jobs.ranks import Ranks, lost_rank_named


class Box(NamedTuple):
    """A part of a named tensor: from where, and how far, in each of its dimensions."""

    name: str
    start: tuple[int, ...]
    size: tuple[int, ...]

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of the whole tensor that the box is."""
        part = whole
        for dimension, (at, length) in enumerate(zip(self.start, self.size, strict=True)):
            part = part.narrow(dimension, at, length)
        return part

    def rows(self, first: int, count: int) -> "Box":
        """Return the box of some of this one's rows."""
        start = (self.start[0] + first, *self.start[1:])
        return Box(self.name, start, (count, *self.size[1:]))


def whole_box(name: str, shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return Box(name, (0,) * len(shape), tuple(shape))


def share_of(length: int, index: int, count: int) -> tuple[int, int]:
    """Return where share ``index`` of ``length`` rows begins and how many it has.

    All shares are as long as the first but the last ones, as torch.chunk divides.
    """
    each = -(-length // count)
    first = min(length, index * each)
    return first, min(length, first + each) - first


class Held(NamedTuple):
    """A box and this rank's tensor of it, which shares its memory with the model's."""

    box: Box
    tensor: nn.Parameter


class Trained(nn.Module):
    """What a rank's optimiser updates, as parameters under the weights' names."""

    def __init__(self, held: Sequence[Held]) -> None:
        super().__init__()
        for each in held:
            self.register_parameter(each.box.name.replace(".", "/"), each.tensor)


class Registry:
    """Who holds which box, known to every rank."""

    def __init__(self, ranks: Ranks, held: Sequence[Held]) -> None:
        """Tell the other ranks what is held here."""
        self._ranks = ranks
        self.held = {each.box: each.tensor for each in held}
        told: list[list[Box]] = [[] for _ in range(ranks.size)]
        with lost_rank_named(ranks):
            dist.all_gather_object(told, [each.box for each in held])
        holders: dict[Box, list[int]] = defaultdict(list)
        for rank, boxes in enumerate(told):
            for box in boxes:
                holders[Box(*box)].append(rank)
        self._holders = dict(sorted(holders.items()))

    def num_holders(self, box: Box) -> int:
        """Return how many ranks hold the same box."""
        return len(self._holders[box])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every whole tensor, by name."""
        found: dict[str, tuple[int, ...]] = {}
        for box in self._holders:
            ends = tuple(at + size for at, size in zip(box.start, box.size, strict=True))
            had = found.get(box.name, (0,) * len(ends))
            found[box.name] = tuple(map(max, had, ends))
        return found

    def given(self, parts: Mapping[Box, torch.Tensor]) -> dict[Box, torch.Tensor]:
        """Return those of this rank's parts that a gather takes from it and not from others."""
        return {
            box: part for box, part in parts.items() if self._holders[box][0] == self._ranks.rank
        }

    def gather(
        self, parts: Mapping[Box, torch.Tensor], group: dist.ProcessGroup | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the whole tensors on the lead, in host memory; nothing on the others.

        ``parts`` are at least those that this rank gives.

        Raises:
            RankLostError: a rank did not send in time.
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
        self, whole: Mapping[str, torch.Tensor], parts: Mapping[Box, torch.Tensor]
    ) -> None:
        """Fill every rank's parts from the whole tensors, which the lead alone has.

        Raises:
            RankLostError: a rank did not take its part in time.
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

    def norm(self, gradients: Mapping[Box, torch.Tensor | None]) -> float:
        """Return the norm of the whole gradient; a box that several hold counts once.

        Raises:
            RankLostError: a rank did not answer in time.
        """
        own = sum(
            float(gradient.float().square().sum()) / self.num_holders(box)
            for box, gradient in gradients.items()
            if gradient is not None
        )
        (total,) = self._ranks.total([own])
        return float(total**0.5)
