"""A rank without a job: ``python -m tests.system.jobs.rank_by_itself PART RANK``."""

import gc
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn.parallel import DistributedDataParallel

from runners.jobs.ranks import joined_ranks
from runners.jobspec import DataParallel

JOB = SimpleNamespace(request=SimpleNamespace(gang=None))


def late(rank: int) -> None:
    """Start late, then fall silent, unless it is the first one."""
    time.sleep(4.0 * rank)
    parallel = DataParallel.model_construct(rank_timeout_seconds=2.0)
    with joined_ranks(JOB, parallel) as ranks:
        time.sleep(4.0 * rank)
        print("started", ranks.total([1.0]), flush=True)  # noqa: T201
        ranks.settle(parallel)
        time.sleep(300.0 * rank)
        ranks.total([1.0])


def parted() -> None:
    """Leave the group, free the model, and say which threads are there."""
    with joined_ranks(JOB, DataParallel()):
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(1, 4)).sum().backward()
    del model
    gc.collect()
    threads = sorted({each.read_text().strip() for each in Path("/proc/self/task").glob("*/comm")})
    print(threads)  # noqa: T201


if __name__ == "__main__":
    if sys.argv[1] == "late":
        late(int(sys.argv[2]))
    else:
        parted()
