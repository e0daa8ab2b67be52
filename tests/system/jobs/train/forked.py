"""Ranks that are forked from one process, which has loaded the libraries for all of them."""

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from runners.jobs.ranks import ALONE, RankFailedError, Ranks
from tests.stack import ROOT, free_port

EXIT_LOST = 7  # of a rank that lost another one


def forked(size: int, work: Callable[[Ranks], None]) -> list[int]:
    """Run ``work`` on ranks that gloo joins; return how each ended, signals below 0."""
    port, pids = free_port(), []
    for rank in range(size):
        pid = os.fork()
        if not pid:
            _end(rank, size, port, work)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _end(rank: int, size: int, port: int, work: Callable[[Ranks], None]) -> None:
    code = 1
    try:
        ranks = _joined(rank, size, port)
        work(ranks)
        ranks.total([0.0])  # nobody leaves while another still waits; who was lost is named
        code = 0
    except RankFailedError as error:
        sys.stderr.write(f"rank {rank}: {error}\n")
        code = EXIT_LOST
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _joined(rank: int, size: int, port: int) -> Ranks:
    if size == 1:
        return ALONE
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=600))
    return Ranks(rank, size, lead=0, local_rank=rank)


def run_script(name: str, folder: Path, *arguments: str, seconds: float = 420) -> None:
    """Run a module of this package in a process of its own; it writes what it saw to a folder."""
    module = f"{__package__}.{name}"
    ran = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module, str(folder), *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    _, words = ran.communicate(timeout=seconds)
    assert ran.returncode == 0, words[-4000:]
