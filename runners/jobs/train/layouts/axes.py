"""Where a rank stands: which copy, share, stage and piece of the sequence are its own."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from runners.jobs.ranks import Ranks
from runners.jobs.runtime import BadInputError
from runners.layout_options import LayoutOptions

AXES = ("pipeline", "replicate", "shard", "tensor")


@dataclass(frozen=True)
class Place:
    """A rank's coordinates. Those that share a sequence share their states too."""

    pipeline: int
    replicate: int
    shard: int
    tensor: int
    data: int  # which micro-batches are its own
    context: int  # which piece of their sequences
    expert: int  # which experts


def place_of(rank: int, options: LayoutOptions) -> Place:
    """Return where a rank stands; neighbouring ranks differ in ``tensor`` first."""
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
    """Refuse a layout that is not for as many ranks as there are.

    Raises:
        BadInputError: with both numbers.
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
    """The mesh that all parts of a layout share, and the groups along and across its axes."""

    def __init__(self, options: LayoutOptions, ranks: Ranks, device_type: str) -> None:
        """Make the groups, which every rank does in the same order.

        Raises:
            BadInputError: the layout is not for as many ranks.
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
        self.named = self._mesh_named()  # the axis of each group, by the group's name
        self.copies = self._group("data", lambda at: (at.pipeline, at.tensor))
        self.context = self._group("context", lambda at: (at.pipeline, at.tensor, at.data))
        self.experts = self._group(
            "expert",
            lambda at: (at.pipeline, at.context, at.data // options.expert_parallel_size),
        )
        self.expert_copies = self._group("data", lambda at: (at.pipeline, at.expert))

    @property
    def num_copies(self) -> int:
        """Return over how many ranks the gradients of a weight are summed."""
        return self.num_replicates * self.num_shards

    def along(self, axis: str) -> dist.ProcessGroup:
        """Return this rank's group along an axis of the mesh."""
        return self.mesh.get_group(axis)

    def anew(self, axis: str, patience_seconds: float) -> dist.ProcessGroup | None:
        """Return a new group of this rank's stages or of its sequence; None where it is alone.

        A message between two ranks is awaited as long as was said when its group was made:
        what torch lets one change later is of exchanges among all of a group.
        """
        keys: dict[str, Callable[[Place], Hashable]] = {
            "pipeline": lambda at: (at.replicate, at.shard, at.tensor),
            "context": lambda at: (at.pipeline, at.tensor, at.data),
        }
        return self._group(axis, keys[axis], timedelta(seconds=patience_seconds))

    def _mesh_named(self) -> dict[str, str]:
        """Return the axes of the mesh's groups; one of all ranks also carries what they agree on.

        torch makes no second group of all ranks on processors.
        """
        everyone = dist.group.WORLD
        found = {str(everyone.group_name): "agreement"} if everyone else {}
        words = {"replicate": "data", "shard": "data"}
        for axis, size in zip(AXES, self.mesh.shape, strict=True):
            if size > 1:
                found[str(self.along(axis).group_name)] = words.get(axis, axis)
        return found

    def _group(
        self, axis: str, key: Callable[[Place], Hashable], timeout: timedelta | None = None
    ) -> dist.ProcessGroup | None:
        """Return the group of the ranks that have this one's key; None where it is alone."""
        groups: dict[Hashable, list[int]] = {}
        for rank in range(self.ranks.size):
            groups.setdefault(key(place_of(rank, self.options)), []).append(rank)
        if all(len(members) == 1 for members in groups.values()):
            return None
        made: dict[Hashable, dist.ProcessGroup] = {
            each: dist.new_group(members, timeout=timeout) for each, members in groups.items()
        }
        own = made[key(self.here)]
        self.named[str(own.group_name)] = axis
        return own
