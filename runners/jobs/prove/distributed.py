"""Stage "distributed": collectives by size, and layouts against one device.

On a host with several GPUs each rank has one, over NCCL; otherwise two ranks share the CPU, over
gloo, which proves the code but no link.
"""

import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runners.jobs.forked_ranks import load_what_training_loads, on_ranks
from runners.jobs.prove.correctness import SHAPE, TRAINING
from runners.jobs.prove.recorder import Recorder, wait_for
from runners.jobs.ranks import ALONE, Ranks

SIZES = (2**12, 2**20, 2**28)  # bytes of an all-reduce
CPU_SIZES = (2**12, 2**20, 2**24)
REPETITIONS = 5
SUM = 3.0  # of the ranks' numbers, 1 and 2
STEPS = 3
TOLERANCE = 0.01  # sums in another order, of products in bf16
LAYOUTS: Mapping[str, Mapping[str, Any] | None] = {
    "data parallel": None,
    "ZeRO 3": {"data_parallel_size": 2, "zero_stage": 3},
    "tensor parallel": {"tensor_parallel_size": 2},
    "pipeline parallel": {"pipeline_parallel_size": 2},
}


def run(recorder: Recorder, folder: Path) -> None:
    """Measure collectives and compare layouts on two ranks with one device."""
    count = torch.cuda.device_count() if recorder.device.type == "cuda" else 0
    if recorder.device.type == "cuda" and count == 1:
        recorder.missing(
            "NCCL and layouts", "this host has one GPU", "Run it on a host with several."
        )
    backend = "cpu:gloo,cuda:nccl" if count > 1 else "gloo"
    sizes = SIZES if count > 1 else CPU_SIZES
    load_what_training_loads(SHAPE)
    with recorder.part("collectives", advice="Read the lines of the ranks above."):
        lead, *_ = on_ranks(2, partial(_all_reduces, sizes, backend), backend)
        for size in sizes:
            recorder.figure(
                f"all-reduce of {size} bytes over {backend}", "bytes/s", [lead[str(size)]]
            )
        recorder.check(
            "sums of ranks",
            is_met=lead["sum"] == SUM,
            expected="1 + 2 = 3 on every element",
            found=f"{lead['sum']:g}",
        )
    alone = _steps(folder, None, "gloo", ALONE)
    for name, layout in LAYOUTS.items():
        if not recorder.has_time(name, 15):
            continue
        with recorder.part(name, advice="Read the lines of the ranks above."):
            lead, *_ = on_ranks(2, partial(_steps, folder, layout, backend), backend)
            apart = max(abs(lead[key] / value - 1) for key, value in alone.items())
            recorder.check(
                name,
                is_met=apart <= TOLERANCE,
                expected=f"losses and gradient norms of one device over {STEPS} steps, within "
                f"{TOLERANCE:.1%}",
                found=f"{apart:.2%} apart",
                advice="Jobs in this layout would train another model.",
            )


def _place(backend: str, ranks: Ranks) -> torch.device:
    if "nccl" not in backend:
        return torch.device("cpu")
    torch.cuda.set_device(ranks.rank)
    return torch.device("cuda", ranks.rank)


def _all_reduces(sizes: tuple[int, ...], backend: str, ranks: Ranks) -> dict[str, float]:
    device = _place(backend, ranks)
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


def _steps(
    folder: Path, layout: Mapping[str, Any] | None, backend: str, ranks: Ranks
) -> dict[str, float]:
    """Return the loss and the gradient norm of each step."""
    from runners.jobs.train.quiet import quiet_trainer

    fields = {**TRAINING, **({"layout": layout} if layout else {})}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        trainer = quiet_trainer(fields, SHAPE, Path(place), ranks, device=_place(backend, ranks))
        trainer.model.train()
        trainer.layout.begin()
        found: dict[str, float] = {}
        for step in range(STEPS):
            values = trainer.make_step()
            found |= {f"{name} {step}": float(values[name]) for name in ("loss", "grad_norm")}
            trainer.state.step += 1
        return found
