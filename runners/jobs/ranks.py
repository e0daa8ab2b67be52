"""The ranks of a distributed job: lead rank, collectives and failure handling.

torchrun assigns the rank. The first rank of the first host is the lead: only it reports,
evaluates and saves. A single process is its own lead and communicates nothing.
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
from runners.jobs.runtime import BadInputError, Job
from runners.jobspec import DataParallel
from runners.supervision.child import die_with

# torch 2.13's messages of a lost or silent rank; gloo raises plain RuntimeErrors.
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
SOURCE_PLACE = re.compile(r"^\[[^\]]*\] ")  # gloo's source location


class RankFailedError(Exception):
    """Another rank ended, or exceeded the job's rank timeout."""


@dataclass(frozen=True)
class Ranks:
    """This process among its peers."""

    rank: int = 0
    size: int = 1
    lead: int = 0
    local_rank: int = 0

    @property
    def is_lead(self) -> bool:
        """Return whether this rank reports, evaluates and saves for all."""
        return self.rank == self.lead

    @property
    def is_alone(self) -> bool:
        """Return whether this is the only rank."""
        return self.size == 1

    @property
    def name(self) -> str:
        """Return this rank's name in log lines, or "" if it is the only one."""
        return "" if self.is_alone else f"[rank {self.rank}] "

    def share(self, count: int) -> range:
        """Return this rank's indices of the ``count`` micro-batches of a step."""
        return range(self.rank, count, self.size)

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of the values over all ranks.

        Raises:
            RankFailedError: not every rank answered in time.
        """
        if self.is_alone:
            return list(values)
        summed = torch.tensor(values, dtype=torch.float64)
        with naming_rank_failures(self):
            dist.all_reduce(summed)
        return [float(value) for value in summed]

    def total_on_device(self, value: torch.Tensor) -> torch.Tensor:
        """Return the fp64 sum of a scalar over all ranks without a wait for the device.

        Raises:
            RankFailedError: not every rank answered in time; under NCCL, its watchdog finds out.
        """
        summed = value.detach().to(pick_device(), torch.float64, copy=True)
        if not self.is_alone:
            with naming_rank_failures(self):
                dist.all_reduce(summed)
        return summed

    def broadcast_from_lead(self, content: bytes) -> bytes:
        """Return the lead's bytes; a collective call of all ranks.

        Raises:
            RankFailedError: not every rank answered in time.
        """
        objects = [content]
        if not self.is_alone:
            with naming_rank_failures(self):
                dist.broadcast_object_list(objects, src=self.lead, device=pick_device())
        return objects[0]

    def copy_from_lead(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite tensors with the lead's; all ranks pass equal shapes in the same order.

        Raises:
            RankFailedError: not every rank answered in time.
        """
        if self.is_alone:
            return
        with naming_rank_failures(self), torch.no_grad():
            for tensor in tensors:
                sent = tensor.detach().to(pick_device()).contiguous()
                dist.broadcast(sent, src=self.lead)
                tensor.copy_(sent)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor to another rank, which receives one of the same shape.

        Raises:
            RankFailedError: the tensor was not received in time.
        """
        with naming_rank_failures(self):
            dist.send(tensor.contiguous(), dst=to)

    def receive(self, tensor: torch.Tensor, sender: int) -> None:
        """Receive a tensor from another rank.

        Raises:
            RankFailedError: nothing arrived in time.
        """
        with naming_rank_failures(self):
            dist.recv(tensor, src=sender)

    def join(self, model: PreTrainedModel) -> PreTrainedModel | DistributedDataParallel:
        """Return the model, wrapped in DDP if there are several ranks.

        Gradients are views of the communication buckets, without a copy.
        """
        if self.is_alone:
            return model
        is_on_gpu = next(model.parameters()).device.type == "cuda"
        devices = [self.local_rank] if is_on_gpu else None
        with naming_rank_failures(self):
            return DistributedDataParallel(
                model,
                device_ids=devices,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
            )

    def settle(self, parallel: DataParallel) -> None:
        """Replace the start timeout by the job's rank timeout."""
        if self.is_alone:
            return
        for group in list(_world.pg_map):  # the default group, and those of a layout
            _set_pg_timeout(timedelta(seconds=parallel.rank_timeout_seconds), group)


ALONE = Ranks()


SNAPSHOT = re.compile(r"/([^/\"]+)/snapshots/([0-9a-f]{40})\b")  # in the cache of a host


def refuse_other_commits(spec: str, ranks: Ranks) -> None:
    """Refuse a spec, as JSON, whose downloads are at other commits than the lead's.

    Each host lists an object store, or a branch, by itself: what changed meanwhile differs.

    Raises:
        BadInputError: the message names both commits.
        RankFailedError: not every rank answered in time.
    """
    own = dict(SNAPSHOT.findall(spec))
    sent = "\n".join(match[0] for match in SNAPSHOT.finditer(spec))
    leads = dict(SNAPSHOT.findall(ranks.broadcast_from_lead(sent.encode()).decode()))
    for name, commit in own.items():
        if leads.get(name, commit) != commit:
            raise BadInputError(
                f"{name} is at commit {commit[:12]} on this host, and at {leads[name][:12]} on "
                "that of the first rank: it was changed while the job began; launch the job again"
            )


@contextlib.contextmanager
def joined_ranks(job: Job, parallel: DataParallel) -> Iterator[Ranks]:
    """Join the process group, and leave it after the block succeeds.

    Until ``Ranks.settle`` the start timeout applies: ranks load libraries, text and model.

    Raises:
        RankFailedError: the ranks did not join in time.
        BadInputError: the hosts have other files of one name.
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
    with naming_rank_failures(Ranks(rank, size)):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
            timeout=timedelta(seconds=parallel.start_timeout_seconds),
        )
    gang = job.request.gang
    is_lead = (gang is None or gang.node_rank == 0) and local_rank == 0
    (lead,) = Ranks(rank, size).total([float(rank) if is_lead else 0.0])
    ranks = Ranks(rank, size, int(lead), local_rank)
    refuse_other_commits(job.request.spec.model_dump_json(), ranks)
    try:
        yield ranks
    finally:
        _never_freed(_world.pg_map)
    dist.destroy_process_group()


def _never_freed(groups: Iterable[dist.ProcessGroup]) -> None:
    """Keep references to groups until the process ends, which it is about to do.

    Freeing a group joins its thread. If DDP's reducer has the last reference, this happens under
    the GIL (torch 2.13), which the thread may need to free a tensor: a deadlock.
    """
    for group in list(groups):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


@contextlib.contextmanager
def naming_rank_failures(ranks: Ranks) -> Iterator[None]:
    """Convert torch's errors of lost connections.

    Raises:
        RankFailedError: another rank was lost.
    """
    try:
        yield
    except RuntimeError as error:
        failure = next(filter(_is_rank_failure, _causes(error)), None)
        if ranks.is_alone or failure is None:
            raise
        message = SOURCE_PLACE.sub("", str(failure).strip().splitlines()[0]).partition(". ")[0]
        raise RankFailedError(f"rank {ranks.rank} of {ranks.size}: {message}") from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes: a pipeline stage wraps the original error."""
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__


def _is_rank_failure(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or any(words in str(error) for words in LOST_WORDS)
