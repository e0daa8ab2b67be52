"""Stage "distributed": collectives by size, and layouts against one device.

On a host with several GPUs each rank has one, over NCCL; otherwise two ranks share the CPU, over
gloo, which proves the code but no link.
"""

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from runners.jobs.device_rates import wait_for
from runners.jobs.forked_ranks import load_what_training_loads, on_ranks
from runners.jobs.prove.correctness import SHAPE
from runners.jobs.prove.layouts import RANKS, READ, LayoutRuns, Start, rank_device
from runners.jobs.prove.recorder import Recorder
from runners.jobs.ranks import Ranks
from runners.jobs.runtime import num_threads

SIZES = (2**12, 2**20, 2**28)  # bytes of an all-reduce
CPU_SIZES = (2**12, 2**20, 2**24)
REPETITIONS = 5
SUM = 3.0  # of the ranks' numbers, 1 and 2


def run(recorder: Recorder, folder: Path) -> None:
    """Measure collectives and compare layouts with one device, on two ranks or more."""
    is_gpu = recorder.device.type == "cuda"
    count = torch.cuda.device_count() if is_gpu else 0
    if is_gpu and count == 1:
        recorder.missing("NCCL", "this host has one GPU", "Run it on a host with several.")
    backend = "cpu:gloo,cuda:nccl" if count > 1 else "gloo"
    with rank_starter(is_fresh=is_gpu) as start:
        with recorder.part("collectives", advice=READ):
            _collectives(recorder, start, backend)
        LayoutRuns(recorder, folder, start, backend, count if is_gpu else num_threads()).record()


@contextlib.contextmanager
def rank_starter(*, is_fresh: bool) -> Iterator[Start]:
    """Yield a function that runs work on ranks, which are forks of a process with the libraries.

    A process that has used CUDA, as a stage does to name its device, has forks that cannot:
    ``is_fresh`` loads the libraries in another process, of which the ranks are forks.
    """
    if not is_fresh:
        load_what_training_loads(SHAPE)
        yield on_ranks
        return
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        fresh.submit(load_what_training_loads, SHAPE).result()

        def start(
            size: int, work: Callable[[Ranks], Mapping[str, float]], backend: str
        ) -> list[dict[str, float]]:
            return fresh.submit(on_ranks, size, work, backend).result()

        yield start


def _collectives(recorder: Recorder, start: Start, backend: str) -> None:
    sizes = SIZES if "nccl" in backend else CPU_SIZES
    lead, *_ = start(RANKS, partial(_all_reduces, sizes, backend), backend)
    for size in sizes:
        recorder.figure(f"all-reduce of {size} bytes over {backend}", "bytes/s", [lead[str(size)]])
    recorder.check(
        "sums of ranks",
        is_met=lead["sum"] == SUM,
        expected="1 + 2 = 3 on every element",
        found=f"{lead['sum']:g}",
    )


def _all_reduces(sizes: tuple[int, ...], backend: str, ranks: Ranks) -> dict[str, float]:
    device = rank_device(backend, ranks)
    found: dict[str, float] = {}
    for size in sizes:
        whole = torch.full((size // 4,), float(ranks.rank + 1), device=device)
        dist.all_reduce(whole)
        found["sum"] = float(whole.mean())
        times = []
        for _ in range(REPETITIONS):
            wait_for(device)
            began = time.perf_counter()
            dist.all_reduce(whole)
            wait_for(device)
            times.append(time.perf_counter() - began)
            whole.zero_()
        found[str(size)] = size / sorted(times)[REPETITIONS // 2]
    return found
