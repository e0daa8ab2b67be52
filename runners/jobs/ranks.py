"""The ranks of a training on several devices or hosts: who leads, what they agree on.

torchrun says which rank this process is. The first rank of the first host leads: it alone
reports, evaluates and saves. Alone, a process is its own lead and nothing is exchanged.
"""

import contextlib
import ctypes
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout, _world
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from runners.jobs.loading import pick_device
from runners.jobs.runtime import Job
from runners.jobspec import DataParallel
from runners.parentage import die_with

# How torch 2.13 says that another rank is gone or silent; gloo raises plain RuntimeErrors.
LOST_WORDS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "Broken pipe",
    "Connection refused",
    "remote process exited",
    "Socket Timeout",
    "failed to recv",
    "wait timeout after",
)
SOURCE_PLACE = re.compile(r"^\[[^\]]*\] ")  # where in gloo's sources the error arose


class RankLostError(Exception):
    """Another rank is gone, or was silent for longer than the job allows."""


@dataclass(frozen=True)
class Ranks:
    """This process among its peers."""

    rank: int = 0
    size: int = 1
    lead: int = 0
    local_rank: int = 0

    @property
    def is_lead(self) -> bool:
        """Tell whether this rank reports, evaluates and saves for all."""
        return self.rank == self.lead

    @property
    def is_alone(self) -> bool:
        """Tell whether there is nobody to agree with."""
        return self.size == 1

    @property
    def name(self) -> str:
        """Return how log lines call this rank; nothing where it is the only one."""
        return "" if self.is_alone else f"[rank {self.rank}] "

    def share(self, count: int) -> range:
        """Return which of ``count`` micro-batches of a step this rank computes."""
        return range(self.rank, count, self.size)

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of the ranks' values.

        Raises:
            RankLostError: not every rank answered in time.
        """
        if self.is_alone:
            return list(values)
        summed = torch.tensor(values, dtype=torch.float64)
        with lost_rank_named(self):
            dist.all_reduce(summed)
        return [float(value) for value in summed]

    def told_by_lead(self, said: bytes) -> bytes:
        """Return what the lead says, whatever the others do; all ranks ask.

        Raises:
            RankLostError: not every rank answered in time.
        """
        told = [said]
        if not self.is_alone:
            with lost_rank_named(self):
                dist.broadcast_object_list(told, src=self.lead, device=pick_device())
        return told[0]

    def copy_from_lead(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite tensors with the lead's; all ranks pass the same shapes in the same order.

        Raises:
            RankLostError: not every rank answered in time.
        """
        if self.is_alone:
            return
        with lost_rank_named(self), torch.no_grad():
            for tensor in tensors:
                sent = tensor.detach().to(pick_device()).contiguous()
                dist.broadcast(sent, src=self.lead)
                tensor.copy_(sent)

    def send(self, tensor: torch.Tensor, to: int, group: dist.ProcessGroup | None = None) -> None:
        """Give a tensor to another rank, which receives one of the same shape in that group.

        Raises:
            RankLostError: it did not take it in time.
        """
        with lost_rank_named(self):
            dist.send(tensor.contiguous(), dst=to, group=group)

    def receive(
        self, tensor: torch.Tensor, sender: int, group: dist.ProcessGroup | None = None
    ) -> None:
        """Fill a tensor with what another rank sends in that group.

        Raises:
            RankLostError: nothing came in time.
        """
        with lost_rank_named(self):
            dist.recv(tensor, src=sender, group=group)

    def join(self, model: PreTrainedModel) -> PreTrainedModel | DistributedDataParallel:
        """Return what to run forward: the model, with gradients averaged over the ranks.

        Gradients lie in the buckets in which they are exchanged, and have no copy beside them.
        """
        if self.is_alone:
            return model
        devices = [self.local_rank] if torch.cuda.is_available() else None
        with lost_rank_named(self):
            return DistributedDataParallel(
                model,
                device_ids=devices,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
            )

    def settle(self, parallel: DataParallel) -> None:
        """End the start: from now on a rank counts as lost as soon as the job says."""
        if self.is_alone:
            return
        for group in list(_world.pg_map):  # the whole one, and those of a layout
            _set_pg_timeout(timedelta(seconds=parallel.rank_timeout_seconds), group)


ALONE = Ranks()


@contextlib.contextmanager
def joined_ranks(job: Job, parallel: DataParallel) -> Iterator[Ranks]:
    """Meet the other ranks, and part from them when the block has ended well.

    They have the time of a start until ``Ranks.settle``: each loads its libraries, text and model.

    Raises:
        RankLostError: they were not there in time.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield ALONE
        return
    die_with(os.getppid())
    local_rank = int(os.environ["LOCAL_RANK"])
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(local_rank)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with lost_rank_named(Ranks(rank, size)):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
            timeout=timedelta(seconds=parallel.start_timeout_seconds),
        )
    gang = job.request.gang
    is_lead = (gang is None or gang.node_rank == 0) and local_rank == 0
    (lead,) = Ranks(rank, size).total([float(rank) if is_lead else 0.0])
    try:
        yield Ranks(rank, size, int(lead), local_rank)
    finally:
        _never_freed(_world.pg_map)
    dist.destroy_process_group()


def _never_freed(groups: Iterable[dist.ProcessGroup]) -> None:
    """Hold groups until the process ends, which it is about to.

    Freeing one waits for its thread. Where the reducer of DDP held it last, that is done under
    Python's lock (torch 2.13), for which the thread may wait to give back a tensor: for ever.
    """
    for group in list(groups):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


@contextlib.contextmanager
def lost_rank_named(ranks: Ranks) -> Iterator[None]:
    """Turn what torch says of a lost connection into one error.

    Raises:
        RankLostError: that is what the error means.
    """
    try:
        yield
    except RuntimeError as error:
        lost = next(filter(_is_of_a_lost_rank, _causes(error)), None)
        if ranks.is_alone or lost is None:
            raise
        said = SOURCE_PLACE.sub("", str(lost).strip().splitlines()[0]).partition(". ")[0]
        raise RankLostError(f"rank {ranks.rank} of {ranks.size}: {said}") from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what caused it: a pipeline's stage tells of its products' failures."""
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__


def _is_of_a_lost_rank(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or any(words in str(error) for words in LOST_WORDS)
