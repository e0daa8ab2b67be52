"""The tensors of a checkpoint as torch.distributed.checkpoint's safetensors files.

Each rank writes the slices that it holds into a file of its own; any number of ranks, in any
layout, reads the slices that it needs. Checkpoints of releases before this one are two files of
whole tensors, which are read in the same way.

Source: torch.distributed.checkpoint, its ``HuggingFaceStorageWriter`` and ``-Reader``.
"""

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from runners.jobs.runtime import BadInputError

OPTIMIZER = "optimizer/"  # begins the names of optimizer states
WHOLE_STATES = "optimizer.safetensors"  # of earlier releases, whose names begin with nothing
FILE_BYTES = 2**28  # torch makes a file of whole in memory, so files are several
# torch says so at each save and load of one process alone.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@dataclass(frozen=True)
class Part:
    """A rank's slice of a whole tensor: where it begins, and the shape of the whole."""

    tensor: torch.Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Return the slice's place in the whole."""
        return ChunkStorageMetadata(torch.Size(self.start), self.tensor.shape)


Parts = Mapping[str, Part]


def whole(tensor: torch.Tensor) -> Part:
    """Return a tensor that one rank holds whole."""
    return Part(tensor, (0,) * tensor.ndim, tuple(tensor.shape))


class StoredTensors(NamedTuple):
    """What a checkpoint holds: weights by name, states by weight and state; whole shapes."""

    weights: dict[str, TensorStorageMetadata]
    optimizer: dict[str, TensorStorageMetadata]
    prefix: str  # of the optimizer's names in the files


def save_parts(folder: Path, parts: Parts, group: dist.ProcessGroup | None) -> None:
    """Write the parts of all ranks of a group, or of this process alone, into a folder.

    A slice that several ranks hold is written once. With a group it is a collective call.

    Raises:
        OSError: a rank could not write, for example on a full disk; every rank raises it.
        ValueError: the parts overlap, or do not make whole tensors.
    """
    writer = _Writer(str(folder), save_distributed=True)
    with _first_failure():
        dcp.save(
            dict(parts),
            storage_writer=writer,
            planner=_SavePlanner(),
            process_group=group,
            no_dist=group is None,
        )


def stored_tensors(folder: Path) -> StoredTensors:
    """Return the names and shapes of a checkpoint's tensors, read from its files' headers.

    Raises:
        BadInputError: a file is damaged.
    """
    with _naming_damage(folder):
        found = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        old = folder / WHOLE_STATES
        states: set[str] = {name for name in found if name.startswith(OPTIMIZER)}
        if old.exists():
            with safe_open(old, framework="pt") as file:
                states = set(file.keys())
    prefix = "" if old.exists() else OPTIMIZER
    tables: dict[bool, dict[str, Any]] = {False: {}, True: {}}
    for name, each in found.items():
        tables[name in states][name.removeprefix(prefix) if name in states else name] = each
    return StoredTensors(tables[False], tables[True], prefix)


def load_parts(folder: Path, parts: Parts) -> None:
    """Fill tensors from a checkpoint, each with its slice of a whole; every rank by itself.

    Raises:
        BadInputError: a file is damaged or missing, or a tensor has another shape.
    """
    with _naming_damage(folder), _first_failure():
        reader = dcp.HuggingFaceStorageReader(str(folder))
        dcp.load(dict(parts), storage_reader=reader, planner=_LoadPlanner(folder), no_dist=True)


@contextlib.contextmanager
def _first_failure() -> Iterator[None]:
    """Raise what a rank raised in place of torch's exception, which is no ``Exception``."""
    try:
        yield
    except dcp.CheckpointException as error:
        failure, _stack = next(iter(error.failures.values()))
        raise failure from error


@contextlib.contextmanager
def _naming_damage(folder: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, KeyError) as error:
        raise BadInputError(_damaged(folder, str(error))) from error


def _damaged(folder: Path, fault: str) -> str:
    return (
        f"the checkpoint {folder.name} is damaged ({fault}); put its files back and resume again, "
        "or run the job again from the start"
    )


class _Writer(dcp.HuggingFaceStorageWriter):  # type: ignore[misc]  # torch leaves it untyped
    """Files of about ``FILE_BYTES``, by the sizes of the whole tensors."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.fqn_to_index_mapping = _files(plans)
        prepared: list[SavePlan] = super().prepare_global_plan(plans)
        return prepared


def _files(plans: Sequence[SavePlan]) -> dict[str, int]:
    """Return the number of the file for each tensor, from 1."""
    sizes: dict[str, int] = {}
    for item in (item for plan in plans for item in plan.items):
        sizes[item.index.fqn] = sizes.get(item.index.fqn, 0) + (item.tensor_storage_size() or 0)
    numbers: dict[str, int] = {}
    number, filled = 1, 0
    for name, size in sorted(sizes.items()):
        if filled and filled + size > FILE_BYTES:
            number, filled = number + 1, 0
        numbers[name], filled = number, filled + size
    return numbers


class _SavePlanner(dcp.DefaultSavePlanner):  # type: ignore[misc]  # the same
    """Plans the writing of parts."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(*each) for each in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        found: torch.Tensor = self.state_dict[index.fqn].tensor
        return found.contiguous()


def _write_item(name: str, part: Part) -> WriteItem:
    properties = TensorProperties.create_from_tensor(part.tensor)
    data = TensorWriteData(part.chunk, properties, torch.Size(part.shape))
    return WriteItem(MetadataIndex(name, part.start), WriteItemType.SHARD, tensor_data=data)


class _LoadPlanner(dcp.DefaultLoadPlanner):  # type: ignore[misc]  # the same
    """Plans the reading of parts, of which every element has to be there."""

    def __init__(self, folder: Path) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._folder = folder

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - torch's own signature
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        stored = self.metadata.state_dict_metadata if self.metadata else {}
        items = []
        for name, part in self.state_dict.items():
            found = stored.get(name)
            if not isinstance(found, TensorStorageMetadata):
                raise BadInputError(_damaged(self._folder, f"it has no tensor {name}"))
            if tuple(found.size) != part.shape:
                shapes = f"{list(found.size)}, and {list(part.shape)} is trained"
                raise BadInputError(_damaged(self._folder, f"its tensor {name} is {shapes}"))
            own = create_read_items_for_chunk_list(name, found, [part.chunk])
            if sum(math.prod(each.lengths) for each in own) != part.tensor.numel():
                fault = f"parts of its tensor {name} are missing"
                raise BadInputError(_damaged(self._folder, fault))
            items += own
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        found: torch.Tensor = self.state_dict[index.fqn].tensor
        return found.detach()
