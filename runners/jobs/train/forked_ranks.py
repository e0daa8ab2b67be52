"""Runs ranks on this machine as forks of one process, which loads the libraries once."""

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runners.jobs.loading import fresh_model
from runners.jobs.ranks import ALONE, Ranks
from runners.jobs.runtime import num_threads
from runners.jobs.train.optimizers import build_optimizer

START_SECONDS = 120.0
Work = Callable[[Ranks], Mapping[str, float]]


def on_ranks(size: int, work: Work, backend: str = "gloo") -> list[dict[str, float]]:
    """Return the results of ``size`` forked ranks, which share this machine's cores.

    Process groups, caches and memory end with the ranks. The caller must not have computed
    gradients, whose threads are not inherited by forks, nor used CUDA.

    Raises:
        RuntimeError: a rank failed; its error is on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        pids = [_forked(rank, size, Path(folder), work, backend) for rank in range(size)]
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(ends):
            raise RuntimeError(f"{size} ranks ended with {ends}; their errors are above")
        return [json.loads(_found(Path(folder), rank).read_text()) for rank in range(size)]


def load_what_training_loads(config: Mapping[str, Any]) -> None:
    """Load the libraries of a first step once for all ranks, without computing gradients."""
    torch.set_num_threads(1)  # a thread pool does not survive a fork
    model = fresh_model(dict(config), torch.float32)
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    build_optimizer(model, 1e-3).step()


def _found(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.json"


def _forked(rank: int, size: int, folder: Path, work: Work, backend: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(max(1, num_threads() // size))
        ranks = _join_group(rank, size, folder, backend)
        _found(folder, rank).write_text(json.dumps(dict(work(ranks))))
        ranks.total([0.0])  # a barrier: no rank exits while another waits for it
        code = 0
    except BaseException:  # noqa: BLE001 - a fork ends here, whatever happened
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _join_group(rank: int, size: int, folder: Path, backend: str) -> Ranks:
    if size == 1:
        return ALONE
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=START_SECONDS),
    )
    return Ranks(rank, size, lead=0, local_rank=rank)
