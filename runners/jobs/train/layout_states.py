"""Axes of a parallel layout, its optimiser states and context parallelism."""

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

# mypy: disable-error-code="no-untyped-call"
# torch's autograd functions are called through an untyped method.
from transformers import AttentionInterface, PreTrainedModel

from runners.jobs.ranks import Ranks
from runners.jobs.runtime import BadInputError
from runners.jobs.train.layout_pipeline import EncoderStage, Stage
from runners.jobs.train.layout_tensor import (
    HeldSlice,
    TensorSlice,
    plain,
    plain_gradient,
    shard_rows,
)
from runners.jobs.train.quantized import Context
from runners.jobspec.train import ContextMethod, LayoutOptions

# ---------------------------------------------------------------------------
# The device mesh of a layout, and each rank's coordinates on it.
# ---------------------------------------------------------------------------


AXES = ("pipeline", "replicate", "shard", "tensor")


@dataclass(frozen=True)
class MeshCoordinates:
    """A rank's coordinates in the device mesh; ``shard`` includes context parallelism."""

    pipeline: int
    replicate: int
    shard: int
    tensor: int
    data: int  # data-parallel index: which micro-batches it computes
    context: int  # which piece of the sequences
    expert: int  # which experts


def mesh_coordinates(rank: int, options: LayoutOptions) -> MeshCoordinates:
    """Return a rank's coordinates; neighbouring ranks differ in ``tensor`` first."""
    tensor, context = options.tensor_parallel_size, options.context_parallel_size
    shards = options.shard_copies * context
    replicates = options.data_parallel_size // options.shard_copies
    rest, own_tensor = divmod(rank, tensor)
    rest, shard = divmod(rest, shards)
    pipeline, replicate = divmod(rest, replicates)
    copy, own_context = divmod(shard, context)
    data = replicate * options.shard_copies + copy
    return MeshCoordinates(
        pipeline, replicate, shard, own_tensor, data, own_context,
        data % options.expert_parallel_size,
    )  # fmt: skip


def check_world(options: LayoutOptions, ranks: Ranks) -> None:
    """Check that the layout's size equals the number of ranks.

    Raises:
        BadInputError: the numbers differ; the message has both.
    """
    if options.world_size != ranks.size:
        msg = (
            f"the layout takes {options.world_size} ranks (data_parallel_size "
            f"{options.data_parallel_size} x tensor_parallel_size {options.tensor_parallel_size} "
            f"x pipeline_parallel_size {options.pipeline_parallel_size} x context_parallel_size "
            f"{options.context_parallel_size}), but {ranks.size} were started; launch it on as "
            "many devices"
        )
        raise BadInputError(msg)


class Axes:
    """The mesh of a layout, and the process groups along its axes."""

    def __init__(self, options: LayoutOptions, ranks: Ranks, device_type: str) -> None:
        """Create the groups, in the same order on every rank.

        Raises:
            BadInputError: the layout has a different number of ranks.
        """
        check_world(options, ranks)
        self.options, self.ranks = options, ranks
        self.here = mesh_coordinates(ranks.rank, options)
        self.num_shards = options.shard_copies * options.context_parallel_size
        self.num_replicates = options.data_parallel_size // options.shard_copies
        shape = (
            options.pipeline_parallel_size,
            self.num_replicates,
            self.num_shards,
            options.tensor_parallel_size,
        )
        self.mesh: DeviceMesh = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
        self.named = self._mesh_named()  # the mesh axis of each process group, by the group's name
        self.copies = self._group("data", lambda at: (at.pipeline, at.tensor))
        self.context = self._group("context", lambda at: (at.pipeline, at.tensor, at.data))
        self.experts = self._group(
            "expert",
            lambda at: (at.pipeline, at.context, at.data // options.expert_parallel_size),
        )
        self.expert_copies = self._group("data", lambda at: (at.pipeline, at.expert))

    @property
    def num_copies(self) -> int:
        """Return the number of ranks over which a weight's gradients are summed."""
        return self.num_replicates * self.num_shards

    def along(self, axis: str) -> dist.ProcessGroup:
        """Return this rank's group along an axis of the mesh."""
        return self.mesh.get_group(axis)

    def new_group(self, axis: str, timeout_seconds: float) -> dist.ProcessGroup | None:
        """Return a new group of this rank's stages or context pieces; None if it has one member.

        The timeout of point-to-point messages is fixed when a group is created; the one that torch
        can change later applies to collectives only.
        """
        keys: dict[str, Callable[[MeshCoordinates], Hashable]] = {
            "pipeline": lambda at: (at.replicate, at.shard, at.tensor),
            "context": lambda at: (at.pipeline, at.tensor, at.data),
        }
        return self._group(axis, keys[axis], timedelta(seconds=timeout_seconds))

    def _mesh_named(self) -> dict[str, str]:
        """Return the mesh axis per group name; a group of all ranks also carries agreements.

        On CPUs torch creates no second group of all ranks.
        """
        world = dist.group.WORLD
        axes = {str(world.group_name): "agreement"} if world else {}
        words = {"replicate": "data", "shard": "data"}
        for axis, size in zip(AXES, self.mesh.shape, strict=True):
            if size > 1:
                axes[str(self.along(axis).group_name)] = words.get(axis, axis)
        return axes

    def _group(
        self,
        axis: str,
        key: Callable[[MeshCoordinates], Hashable],
        timeout: timedelta | None = None,
    ) -> dist.ProcessGroup | None:
        """Return the group of the ranks with this rank's key; None if it is always alone."""
        groups: dict[Hashable, list[int]] = {}
        for rank in range(self.ranks.size):
            groups.setdefault(key(mesh_coordinates(rank, self.options)), []).append(rank)
        if all(len(members) == 1 for members in groups.values()):
            return None
        created: dict[Hashable, dist.ProcessGroup] = {
            each: dist.new_group(members, timeout=timeout) for each, members in groups.items()
        }
        own_group = created[key(self.here)]
        self.named[str(own_group.group_name)] = axis
        return own_group


# ---------------------------------------------------------------------------
# ZeRO: sharding of optimizer states, gradients and weights, or none of it.
#
# Stage 1 shards the optimizer states by rows, stage 2 also the gradients, during the backward
# pass. Stage 3 also shards the weights, which torch's ``fully_shard`` gathers per layer. With
# several shard groups, each holds everything once (hybrid sharding). Source: Rajbhandari et al.
# 2020 (ZeRO), arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277.
# ---------------------------------------------------------------------------


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

    def after_update(self) -> None:
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
                if weight.box.name in self._views:
                    first, count = self._own_rows(weight)
                    self._views[weight.box.name].grad = gradient.narrow(0, first, count)
        self.exchange_seconds += time.monotonic() - began

    def after_update(self) -> None:
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

    def _own_rows(self, weight: Weight) -> tuple[int, int]:
        return shard_rows(weight.box.size[0], self._index, self._count)

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
            size = _longest_row_share(local, self._count)
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
            first, count = shard_rows(box.size[0], axes.here.shard, axes.num_shards)
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

    def after_update(self) -> None:
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


def _longest_row_share(local: torch.Tensor, count: int) -> int:
    """Return the elements of the longest of ``count`` shares of a tensor's rows."""
    return -(-len(local) // count) * (local.numel() // max(1, len(local)))


def _padded_rows(local: torch.Tensor, count: int) -> torch.Tensor:
    """Return a tensor's rows in ``count`` equal shares, padded with zeros."""
    share_rows = -(-len(local) // count)
    padding = share_rows * count - len(local)
    if padding:
        local = torch.cat([local, local.new_zeros(padding, *local.shape[1:])])
    return local.reshape(count, share_rows, *local.shape[1:])


# ---------------------------------------------------------------------------
# Context parallelism: each rank has a piece of every sequence; attention spans all pieces.
#
# Keys and values are all-gathered, or passed around a ring block by block with an online softmax.
# Each rank's piece comes from both ends of a sequence, to balance causal attention.
# Source: Liu et al. 2023 (Ring Attention), arXiv:2310.01889; Llama 3, arXiv:2407.21783, section
# 3.3.2, for gathering and for the order of the pieces.
# ---------------------------------------------------------------------------


NAME = "slipway_context"
LENGTH = 2  # dimension of the length in [rows, heads, length, width]


def rank_tokens(length: int, count: int) -> torch.Tensor:
    """Return the tokens of each rank [count, length / count]: one piece from either end.

    Raises:
        BadInputError: the sequence cannot be divided so.
    """
    if length % (2 * count):
        msg = (
            f"sequence_length is {length}, which context_parallel_size {count} cannot "
            f"divide into {2 * count} pieces; choose a multiple of {2 * count}"
        )
        raise BadInputError(msg)
    pieces = torch.arange(length).view(2 * count, -1)
    return torch.stack(
        [torch.cat([pieces[at], pieces[2 * count - 1 - at]]) for at in range(count)]
    )


def use_context_parallel_attention(
    model: PreTrainedModel, method: ContextMethod, group: dist.ProcessGroup
) -> None:
    """Switch the model to attention over the keys and values of all ranks of the group."""
    register_context_parallel_attention(method, group)
    model.config._attn_implementation = NAME  # noqa: SLF001 - it has no public name


def register_context_parallel_attention(method: ContextMethod, group: dist.ProcessGroup) -> None:
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
    both: torch.Tensor = _AllGather.apply(torch.stack([key, value]), group)
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
            both = _RingShift.apply(both, group)
    return (output / total).to(value.dtype)


class _AllGather(torch.autograd.Function):
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


class _RingShift(torch.autograd.Function):
    """Send a block to the next rank, and receive the previous rank's block."""

    @staticmethod
    def forward(ctx: Context, block: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _ring_shift(block, group, 1)

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _ring_shift(gradient, ctx.group, -1), None


def _ring_shift(block: torch.Tensor, group: dist.ProcessGroup, step: int) -> torch.Tensor:
    index, count = dist.get_rank(group), dist.get_world_size(group)
    to, origin = ((index + each) % count for each in (step, -step))
    received = torch.empty_like(block)
    sending = dist.isend(block.contiguous(), group=group, group_dst=to)
    dist.recv(received, group=group, group_src=origin)
    if sending is not None:
        sending.wait()
    return received
