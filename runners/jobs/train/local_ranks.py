"""Runs ranks on this machine: forks of one process without a GPU, new processes with one."""

import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from runners.jobs.loading import fresh_model
from runners.jobs.memory import release_free_memory
from runners.jobs.ranks import ALONE, Ranks
from runners.jobs.runtime import num_threads
from runners.jobs.train.optimizers import build_optimizer

START_SECONDS = 120.0
Work = Callable[[Ranks], Mapping[str, float]]


def on_ranks(size: int, work: Work, backend: str = "gloo") -> list[dict[str, float]]:
    """Return the results of ``size`` forked ranks, which share this machine's cores.

    Process groups, caches and memory end with the ranks. The caller must not have computed
    gradients, whose threads are not inherited by forks, and the machine must have no GPU visible
    to torch: an optimiser's step asks CUDA for its state, after which no fork can use it.

    Raises:
        RuntimeError: a rank failed; the message is its error.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pids = [_forked(rank, size, folder, work, backend) for rank in range(size)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        for rank, code in enumerate(codes):
            if code:
                error = _error_file(folder, rank)
                text = error.read_text() if error.exists() else f"ended with code {code}"
                raise RuntimeError(f"rank {rank} of {size}: {text}")
        return [json.loads(_result_file(folder, rank).read_text()) for rank in range(size)]


class RankProcesses:
    """Ranks in new processes, which can use CUDA; they are kept for the next work.

    Use it as a context: at its end the processes are killed.
    """

    def __init__(self) -> None:
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._kill()

    def run(self, size: int, work: Work, backend: str) -> list[dict[str, float]]:
        """Return the results of ``size`` ranks in the order of their numbers.

        Raises:
            RuntimeError: a rank failed; the message is its error. The others are killed, since
                they may wait for it.
        """
        while len(self._processes) < size:
            self._add_process()
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(size):
                self._connections[rank].send((rank, size, Path(folder), work, backend))
            results: dict[int, dict[str, float]] = {}
            while len(results) < size:
                waiting = [self._connections[rank] for rank in range(size) if rank not in results]
                for connection in wait(waiting):
                    rank = self._connections.index(connection)  # type: ignore[arg-type]
                    try:
                        error, result = self._connections[rank].recv()
                    except EOFError:
                        error, result = "its process ended without a result", {}
                    if error:
                        self._kill()
                        raise RuntimeError(f"rank {rank} of {size}: {error}")
                    results[rank] = result
            return [results[rank] for rank in range(size)]

    def _add_process(self) -> None:
        context = multiprocessing.get_context("spawn")
        own, others = context.Pipe()
        process = context.Process(target=_work_until_closed, args=(others,), daemon=True)
        process.start()
        others.close()
        self._processes.append(process)
        self._connections.append(own)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []


def _work_until_closed(connection: Connection) -> None:
    """Run one work after the other as a rank; answer each with its error, or "", and result."""
    while True:
        try:
            rank, size, folder, work, backend = connection.recv()
        except EOFError:
            return
        try:
            torch.set_num_threads(max(1, num_threads() // size))
            ranks = _join_group(rank, size, folder, backend)
            result = dict(work(ranks))
            ranks.total([0.0])  # a barrier: no rank leaves while another waits for it
            if size > 1:
                dist.destroy_process_group()
            release_free_memory()
        except Exception as error:  # noqa: BLE001 - the parent decides
            traceback.print_exc()
            connection.send((_error_text(error), {}))
        else:
            connection.send(("", result))


def load_what_training_loads(config: Mapping[str, Any]) -> None:
    """Load the libraries of a first step once for all ranks, without computing gradients."""
    torch.set_num_threads(1)  # a thread pool does not survive a fork
    model = fresh_model(dict(config), torch.float32)
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    build_optimizer(model, 1e-3).step()


def _result_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.json"


def _error_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.error"


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _forked(rank: int, size: int, folder: Path, work: Work, backend: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(max(1, num_threads() // size))
        ranks = _join_group(rank, size, folder, backend)
        _result_file(folder, rank).write_text(json.dumps(dict(work(ranks))))
        ranks.total([0.0])  # a barrier: no rank exits while another waits for it
        code = 0
    except BaseException as error:  # noqa: BLE001 - a fork ends here, whatever happened
        traceback.print_exc()
        _error_file(folder, rank).write_text(_error_text(error))
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
