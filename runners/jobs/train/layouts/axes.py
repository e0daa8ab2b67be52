"""The device mesh of a layout, and each rank's coordinates on it."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from runners.jobs.ranks import Ranks
from runners.jobs.runtime import BadInputError
from runners.jobspec.train import LayoutOptions

AXES = ("pipeline", "replicate", "shard", "tensor")


@dataclass(frozen=True)
class Place:
    """A rank's coordinates. Ranks that share a sequence also share sharded states."""

    pipeline: int
    replicate: int
    shard: int
    tensor: int
    data: int  # data-parallel index: which micro-batches it computes
    context: int  # which piece of the sequences
    expert: int  # which experts


def place_of(rank: int, options: LayoutOptions) -> Place:
    """Return a rank's coordinates; neighbouring ranks differ in ``tensor`` first."""
    tensor, context = options.tensor_parallel_size, options.context_parallel_size
    shards = options.shard_copies * context
    replicates = options.data_parallel_size // options.shard_copies
    rest, own_tensor = divmod(rank, tensor)
    rest, shard = divmod(rest, shards)
    pipeline, replicate = divmod(rest, replicates)
    copy, own_context = divmod(shard, context)
    data = replicate * options.shard_copies + copy
    return Place(
        pipeline, replicate, shard, own_tensor, data, own_context,
        data % options.expert_parallel_size,
    )  # fmt: skip


def check_world(options: LayoutOptions, ranks: Ranks) -> None:
    """Check that the layout's size equals the number of ranks.

    Raises:
        BadInputError: they differ; the message has both numbers.
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
        self.here = place_of(ranks.rank, options)
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

    def anew(self, axis: str, patience_seconds: float) -> dist.ProcessGroup | None:
        """Return a new group of this rank's stages or context pieces; None if it has one member.

        The timeout of point-to-point messages is fixed when a group is created; the one that torch
        can change later applies to collectives only.
        """
        keys: dict[str, Callable[[Place], Hashable]] = {
            "pipeline": lambda at: (at.replicate, at.shard, at.tensor),
            "context": lambda at: (at.pipeline, at.tensor, at.data),
        }
        return self._group(axis, keys[axis], timedelta(seconds=patience_seconds))

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
        self, axis: str, key: Callable[[Place], Hashable], timeout: timedelta | None = None
    ) -> dist.ProcessGroup | None:
        """Return the group of the ranks with this rank's key; None if it is always alone."""
        groups: dict[Hashable, list[int]] = {}
        for rank in range(self.ranks.size):
            groups.setdefault(key(place_of(rank, self.options)), []).append(rank)
        if all(len(members) == 1 for members in groups.values()):
            return None
        created: dict[Hashable, dist.ProcessGroup] = {
            each: dist.new_group(members, timeout=timeout) for each, members in groups.items()
        }
        own_group = created[key(self.here)]
        self.named[str(own_group.group_name)] = axis
        return own_group
