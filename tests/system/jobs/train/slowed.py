"""Trainings that write their checkpoints beside the steps, on a disk that is slow or torn away.

``python -m tests.system.jobs.train.slowed FOLDER [CASE]``: each case trains on forked gloo ranks
writing every checkpoint in its step, then beside the steps on a slow disk, then once more until
the lead is killed in the middle of a write, and goes on from what that left. The same ranks do a
part of all cases of their number; those of a case that is killed are its own.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from runners.jobs.ranks import ALONE, Ranks
from runners.jobs.train.communication import CollectiveProfiler
from tests.system.jobs.train.forked import forked
from tests.system.jobs.train.killed import EVERY_STEP, size_of
from tests.system.jobs.train.laid_out import (
    DP,
    LLAMA,
    MODELS,
    PP,
    TP,
    ZERO,
    Seen,
    import_what_training_imports,
    trainer_of,
)

STEPS = 12
SLOW_STEPS = 2  # that are made while a rank's file of a checkpoint is written
SMALL = "llama of two layers"
MODELS[SMALL] = {**LLAMA, "num_hidden_layers": 2}
STEP_SECONDS = 0.05  # that a step beside a write takes at least: the disk is no faster
PATIENCE_SECONDS = 60.0
TORN = 3  # which checkpoint the lead is killed in
FROM_THE_START = "pipeline"  # here it is the second: what is left is of before the first step
# A layout, and the one in which the killed training goes on: the same, or of other ranks.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alone": ({}, {}),
    "data parallel": (DP, {}),
    "ZeRO-3": (ZERO["ZeRO-3"], {}),
    "pipeline": (PP, PP),
    "tensor": (TP, {}),
}
save = safetensors.torch.save


class Disk:
    """A disk as slow as some steps, which notes how many were made until a file stands."""

    def __init__(self, trainer: Seen, *, tears_at: int = 0) -> None:
        self.trainer, self.tears_at = trainer, tears_at
        self.passed: list[int] = []  # steps that were made while a file was written
        self._files = 0

    def save(self, tensors: Mapping[str, torch.Tensor], **options: Any) -> bytes:
        self._files += 1
        before = self.trainer.state.step
        until, deadline = min(STEPS, before + SLOW_STEPS), time.monotonic() + PATIENCE_SECONDS
        while self.trainer.state.step < until and time.monotonic() < deadline:
            time.sleep(0.002)
        if self._files == self.tears_at:  # its file stands open, and is empty
            os.kill(os.getpid(), signal.SIGKILL)
        self.passed.append(self.trainer.state.step - before)
        return save(tensors, **options)


def slow_down(trainer: Seen) -> None:
    """Have each step take a while, which no core spends."""
    make_step = trainer.make_step

    def slowly() -> dict[str, float]:
        time.sleep(STEP_SECONDS)
        return make_step()

    trainer.make_step = slowly


def train(part: str, options: dict[str, Any], ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Train one part of a case to its end, and return what this rank saw."""
    changes = {"checkpoint_every_seconds": EVERY_STEP, "keep_checkpoints": 100}
    changes |= {"keep_best": False}  # its files would be counted among the checkpoints'
    how = "in_step" if part == "in_step" else "background"
    trainer = trainer_of(
        SMALL, options or None, ranks, folder,
        max_steps=STEPS, gradient_accumulation_steps=2, checkpoint_writing=how, **changes,
    )  # fmt: skip
    trainer.watch = CollectiveProfiler(ALONE)  # a look takes longer than the step
    torn = TORN - 1 if folder.parent.name == FROM_THE_START else TORN
    disk = Disk(trainer, tears_at=torn if part == "killed" and ranks.is_lead else 0)
    if part in {"beside", "killed"}:
        safetensors.torch.save = disk.save
        slow_down(trainer)
    trainer.resume()
    trainer.run()
    safetensors.torch.save = save
    return {
        "losses": [each["loss"] for each in trainer.values],
        "resumed_at_step": trainer.resumed_at_step,
        "passed": disk.passed,
        "waited_seconds": trainer.writer.waited_seconds,
        "written_seconds": trainer.writer.written_seconds,
        "copied_bytes": trainer.writer.copied_bytes,
        "num_written": trainer.writer.num_written,
    }


def run(part: str, names: Sequence[str], size: int, folder: Path) -> list[int]:
    """Run a part of cases on forked ranks; return how each rank ended, signals below 0."""
    for name in names:
        (folder / name / part).mkdir(parents=True, exist_ok=True)

    def on_rank(ranks: Ranks) -> None:
        for name in names:
            options, then = CASES[name]
            left = "killed" if part in {"killed", "resumed"} else part
            work = folder / name / f"{left}-work"
            found = train(part, then if part == "resumed" else options, ranks, work)
            (folder / name / part / f"{ranks.rank}.json").write_text(json.dumps(found))

    return forked(size, on_rank)


def main() -> None:
    """Run all cases, or those named, below the folder."""
    torch.set_num_threads(1)
    import_what_training_imports()
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(CASES)
    ends: list[int] = []
    for part, layout in (("in_step", 0), ("beside", 0), ("killed", 0), ("resumed", 1)):
        sizes = {name: size_of(CASES[name][layout]) for name in names}
        if part == "killed":
            killed = {name: run(part, [name], sizes[name], folder) for name in names}
            (folder / "killed.json").write_text(json.dumps(killed))
            continue
        for size in sorted(set(sizes.values())):
            ends += run(part, [name for name in names if sizes[name] == size], size, folder)
    if any(ends):
        sys.exit(f"ranks that nobody killed ended with {ends}")


if __name__ == "__main__":
    main()
