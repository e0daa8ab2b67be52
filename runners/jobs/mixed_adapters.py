"""Applies many adapters in one batch: each token uses its own adapter, or none.

A layer's adapter matrices are concatenated: one product of all tokens with all of them, the
columns of other adapters masked, one product back. On the CPU two products of a few hundred
columns cost less than one small product per adapter. The base is computed once for all.

Source: Zhou et al. 2022 (PetS), USENIX ATC, section 4.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from runners.endpoint_spec import NO_ADAPTER
from runners.jobs.adapter_files import (
    Adapter,
    Pair,
    base_digest,
    opened_adapter,
    read_adapter,
)
from runners.jobs.memory import tensor_bytes
from runners.jobspec import ModelRef, NamedAdapter

NONE = NO_ADAPTER  # the base alone


class Stack:
    """The concatenated adapter matrices of one linear layer."""

    def __init__(self, pairs: Sequence[Pair | None], like: torch.Tensor, widest: int) -> None:
        """Concatenate the pairs, each padded to the widest; None changes nothing."""
        down = like.new_zeros(len(pairs), widest, _first(pairs).down.shape[1])
        up = like.new_zeros(len(pairs), widest, _first(pairs).up.shape[0])
        for at, pair in enumerate(pairs):
            if pair is not None:
                down[at, : pair.down.shape[0]] = pair.down
                up[at, : pair.up.shape[1]] = pair.up.T
        self.down = down
        self.up = up

    def change(
        self, inputs: torch.Tensor, present: Sequence[int], own: torch.Tensor
    ) -> torch.Tensor:
        """Return the adapters' contribution to the layer's outputs.

        ``own`` is 1 where a column belongs to the token's adapter, else 0.
        """
        whole = len(present) == len(self.down)
        down = self.down if whole else self.down[list(present)]
        up = self.up if whole else self.up[list(present)]
        inner = inputs.to(down.dtype) @ down.flatten(0, 1).T
        return (inner * own) @ up.flatten(0, 1)


class MixedAdapters:
    """Adapters attached to a model; within ``serving`` each token has its own."""

    def __init__(self, model: torch.nn.Module, adapters: Sequence[Adapter]) -> None:
        """Attach the adapters to the linear layers that any of them changes."""
        self.names = tuple(each.name for each in adapters)
        self._stacks: list[Stack] = []
        self._present: tuple[int, ...] = ()
        self._own: torch.Tensor | None = None
        like = next(each for each in model.parameters() if each.is_floating_point())
        ranks = [pair.down.shape[0] for each in adapters for pair in each.pairs.values()]
        self._widest = max(ranks, default=0)
        for name in sorted({name for each in adapters for name in each.pairs}):
            pairs = [each.pairs.get(name) for each in adapters]
            self._attach(model.get_submodule(name), Stack(pairs, like, self._widest))
        self._like = like

    @property
    def bytes(self) -> int:
        """Return the size of all adapters' matrices in bytes."""
        return sum(tensor_bytes(each.down) + tensor_bytes(each.up) for each in self._stacks)

    @contextmanager
    def serving(self, owners: torch.Tensor) -> Iterator[None]:
        """Select each token's adapter while the block runs.

        ``owners`` has the shape of the model's inputs, or one that broadcasts to it: the index of
        each token's adapter, ``NONE`` for the base only.
        """
        self._present = tuple(sorted(set(owners.flatten().tolist()) - {NONE}))
        places = torch.tensor(self._present, dtype=owners.dtype).repeat_interleave(self._widest)
        own = owners[..., None] == places
        self._own = own.to(self._like.device, self._like.dtype) if self._present else None
        try:
            yield
        finally:
            self._own = None

    def _attach(self, linear: torch.nn.Module, stack: Stack) -> None:
        self._stacks.append(stack)

        def add(
            _linear: torch.nn.Module, inputs: tuple[torch.Tensor, ...], outputs: torch.Tensor
        ) -> torch.Tensor:
            if self._own is None:
                return outputs
            change = stack.change(inputs[0], self._present, self._own)
            return outputs + change.to(outputs.dtype)

        linear.register_forward_hook(add)


def hung_on(
    model: torch.nn.Module, base: ModelRef, asked: Sequence[NamedAdapter], host_dir: Path
) -> MixedAdapters | None:
    """Attach a job's adapters to its model and return them, or None if it has none.

    Raises:
        BadInputError: an adapter is incomplete, or not for this model.
        MissingModelError: an adapter does not exist.
    """
    if not asked:
        return None
    digest = base_digest(base, host_dir)
    opened = [
        read_adapter(each.name, opened_adapter(each.adapter, host_dir), model, digest)
        for each in asked
    ]
    return MixedAdapters(model, opened)


def _first(pairs: Sequence[Pair | None]) -> Pair:
    return next(each for each in pairs if each is not None)
