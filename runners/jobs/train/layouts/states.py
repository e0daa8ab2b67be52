"""ZeRO: sharding of optimizer states, gradients and weights, or none of it.

Stage 1 shards the optimizer states by rows, stage 2 also the gradients, during the backward pass.
Stage 3 also shards the weights, which torch's ``fully_shard`` gathers per layer. With several
shard groups, each holds everything once (hybrid sharding).
Source: Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from runners.jobs.train.layouts.axes import Axes
from runners.jobs.train.layouts.stage import EncoderStage, Stage
from runners.jobs.train.layouts.tensor import (
    HeldSlice,
    TensorSlice,
    plain,
    plain_gradient,
    share_of,
)

BUCKET_ELEMENTS = 8 * 2**20  # per collective: 32 MiB of fp32, similar to DDP


class Weight(NamedTuple):
    """A parameter of a stage, and the slice of the whole weight that it is."""

    parameter: nn.Parameter
    box: TensorSlice
    group: dist.ProcessGroup | None  # the ranks with the same slice; None: only this one


class States(Protocol):
    """The tensors that a rank's optimizer updates, and their synchronisation with other ranks."""

    held: list[HeldSlice]
    loss_scale: float
    exchange_seconds: float

    def collect(self) -> None:
        """Set the gradients of the held tensors, summed over the ranks."""

    def spread(self) -> None:
        """Send the updated weights to where they are used, and free the gradients."""

    def weight_bytes(self) -> int:
        """Return the bytes of the weights here, between steps."""


class Copies:
    """Whole weights on every rank; ``is_sharded``: each rank updates some rows of each weight."""

    loss_scale = 1.0

    def __init__(self, weights: Sequence[Weight], axes: Axes, *, is_sharded: bool) -> None:
        self._weights, self._axes = list(weights), axes
        self._count = axes.num_shards if is_sharded else 1
        self._index = axes.here.shard if is_sharded else 0
        self._rows = [self._own_rows(each) for each in self._weights]
        self.held = [
            HeldSlice(weight.box.rows(first, count), self._view(weight, first, count))
            for weight, (first, count) in zip(self._weights, self._rows, strict=True)
            if count
        ]
        self._views = {each.box.name: each.tensor for each in self.held}
        self.exchange_seconds = 0.0

    def collect(self) -> None:
        """Set the gradients of the held tensors, summed over the ranks."""
        began = time.monotonic()
        for group, bucket in _buckets(self._weights):
            gradients = [self._take_gradient(each) for each in bucket]
            _sum_together(gradients, group)
            for weight, gradient in zip(bucket, gradients, strict=True):
                self._set_gradient(weight, gradient)
        self.exchange_seconds += time.monotonic() - began

    def spread(self) -> None:
        """Send the updated weights to where they are used, and free the gradients."""
        for each in self.held:
            each.tensor.grad = None
        if self._count == 1:
            return
        began = time.monotonic()
        for _group, bucket in _buckets(self._weights):
            self._gather_rows(bucket)
        self.exchange_seconds += time.monotonic() - began

    def weight_bytes(self) -> int:
        """Return the bytes of the weights here, between steps."""
        return sum(plain(each.parameter).nbytes for each in self._weights)

    def _take_gradient(self, weight: Weight) -> torch.Tensor:
        gradient = plain_gradient(weight.parameter)
        weight.parameter.grad = None
        if gradient is None:  # unused in this step
            return torch.zeros_like(plain(weight.parameter.detach()))
        return gradient.contiguous()

    def _set_gradient(self, weight: Weight, gradient: torch.Tensor) -> None:
        if weight.box.name in self._views:
            first, count = self._own_rows(weight)
            self._views[weight.box.name].grad = gradient.narrow(0, first, count)

    def _own_rows(self, weight: Weight) -> tuple[int, int]:
        return share_of(weight.box.size[0], self._index, self._count)

    def _view(self, weight: Weight, first: int, count: int) -> nn.Parameter:
        local = plain(weight.parameter.detach())
        return nn.Parameter(local.narrow(0, first, count))

    @torch.no_grad()
    def _gather_rows(self, bucket: Sequence[Weight]) -> None:
        locals_ = [plain(each.parameter.detach()) for each in bucket]
        own = torch.cat(
            [_padded_rows(each, self._count)[self._index].flatten() for each in locals_]
        )
        gathered = own.new_empty(self._count * len(own))
        dist.all_gather_into_tensor(gathered, own, group=self._axes.along("shard"))
        at = 0
        shares = gathered.view(self._count, -1)
        for local in locals_:
            size = _row_share(local, self._count)
            rows = shares[:, at : at + size].reshape(-1, *local.shape[1:])
            local.copy_(rows[: len(local)])
            at += size


class ShardedGradients(Copies):
    """ZeRO stage 2: sharded ``Copies`` with gradients reduce-scattered in the backward pass."""

    def __init__(self, weights: Sequence[Weight], axes: Axes) -> None:
        super().__init__(weights, axes, is_sharded=True)
        self._buckets = [bucket for _, bucket in _buckets(self._weights)]
        self._pending: list[set[str]] = [
            {each.box.name for each in bucket} for bucket in self._buckets
        ]
        for index, bucket in enumerate(self._buckets):
            for weight in bucket:
                hook = self._arrived(index, weight.box.name)
                parameter: Any = weight.parameter  # the hook's method is untyped
                parameter.register_post_accumulate_grad_hook(hook)

    def collect(self) -> None:
        """Do nothing: every gradient was summed in the backward pass."""

    def _arrived(self, index: int, name: str) -> Callable[[torch.Tensor], None]:
        def note(_parameter: torch.Tensor) -> None:
            waiting = self._pending[index]
            waiting.discard(name)
            if not waiting:
                self._shard(self._buckets[index])
                waiting.update(each.box.name for each in self._buckets[index])

        return note

    @torch.no_grad()
    def _shard(self, bucket: Sequence[Weight]) -> None:
        began = time.monotonic()
        gradients = [self._take_gradient(each) for each in bucket]
        shares = [_padded_rows(each, self._count).view(self._count, -1) for each in gradients]
        sent = torch.cat(shares, dim=1)
        own = sent.new_empty(sent.shape[1])
        dist.reduce_scatter_tensor(own, sent.flatten(), group=self._axes.along("shard"))
        if self._axes.num_replicates > 1:
            dist.all_reduce(own, group=self._axes.along("replicate"))
        parts = torch.split(own, [len(each[0]) for each in shares])
        for weight, part in zip(bucket, parts, strict=True):
            self._add_gradient(weight, part)
        self.exchange_seconds += time.monotonic() - began

    def _add_gradient(self, weight: Weight, part: torch.Tensor) -> None:
        _first, count = self._own_rows(weight)
        if not count:
            return
        view = self._views[weight.box.name]
        own = part[: view.numel()].view(view.shape)
        view.grad = own.clone() if view.grad is None else view.grad + own


class ShardedWeights:
    """ZeRO stage 3: weights, gradients and states in shards; weights are gathered per layer."""

    def __init__(
        self, stages: Sequence[Stage | EncoderStage], boxes: Sequence[TensorSlice], axes: Axes
    ) -> None:
        """Shard the stages, whose weights are these slices before."""
        mesh = axes.mesh["replicate", "shard"] if axes.num_replicates > 1 else axes.mesh["shard"]
        for stage in stages:
            for block in stage.blocks.values():
                fully_shard(block, mesh=mesh)
            fully_shard(stage, mesh=mesh)
        named = {name: each for stage in stages for name, each in stage.named_parameters()}
        self._parameters = list(named.values())
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self.held: list[HeldSlice] = []
        for box in boxes:
            parameter = named[box.name]
            first, count = share_of(box.size[0], axes.here.shard, axes.num_shards)
            if count:
                own = nn.Parameter(plain(parameter.detach()))
                self.held.append(HeldSlice(box.rows(first, count), own))
                self._pairs.append((parameter, own))
        self.loss_scale = float(axes.num_copies)  # torch averages over the ranks
        self.exchange_seconds = 0.0

    def collect(self) -> None:
        """Set the gradients of the held shards, which the backward pass has summed."""
        for parameter, own in self._pairs:
            own.grad = plain_gradient(parameter)

    def spread(self) -> None:
        """Free the gradients; weights are gathered when they are used."""
        for parameter, own in self._pairs:
            parameter.grad = own.grad = None

    def weight_bytes(self) -> int:
        """Return the bytes of the weights here, between steps."""
        return sum(plain(each.detach()).nbytes for each in self._parameters)


def _buckets(weights: Sequence[Weight]) -> Iterator[tuple[dist.ProcessGroup | None, list[Weight]]]:
    """Yield runs of weights with the same group, each of about ``BUCKET_ELEMENTS``."""
    for _, run in groupby(weights, lambda each: id(each.group)):
        bucket: list[Weight] = []
        size = 0
        for weight in run:
            bucket.append(weight)
            size += math.prod(weight.box.size)
            if size >= BUCKET_ELEMENTS:
                yield bucket[0].group, bucket
                bucket, size = [], 0
        if bucket:
            yield bucket[0].group, bucket


def _sum_together(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    if group is None:
        return
    flat = torch.cat([each.flatten() for each in tensors])
    dist.all_reduce(flat, group=group)
    parts = torch.split(flat, [each.numel() for each in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def _row_share(local: torch.Tensor, count: int) -> int:
    """Return the elements of the longest of ``count`` shares of a tensor's rows."""
    return -(-len(local) // count) * (local.numel() // max(1, len(local)))


def _padded_rows(local: torch.Tensor, count: int) -> torch.Tensor:
    """Return a tensor's rows in ``count`` equal shares, padded with zeros."""
    share_rows = -(-len(local) // count)
    padding = share_rows * count - len(local)
    if padding:
        local = torch.cat([local, local.new_zeros(padding, *local.shape[1:])])
    return local.reshape(count, share_rows, *local.shape[1:])
