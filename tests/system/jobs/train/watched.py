"""Trainings of two ranks whose messages are looked at: ``python -m ... FOLDER`` runs them all."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import runners.jobs  # noqa: F401 - quiets the profiler before torch is loaded
from runners.jobs.ranks import Ranks
from runners.jobs.train.communication import FIRST_LOOK, CollectiveProfiler
from tests.system.jobs.train.forked import forked
from tests.system.jobs.train.laid_out import (
    DP,
    EP,
    PP,
    TP,
    ZERO,
    import_what_training_imports,
    model_of,
    trainer_of,
)

STEPS = FIRST_LOOK + 1
SLOW = "a slow peer"
FOUR = "data and tensor, on 4 ranks"
LATE_SECONDS = 0.5
CALM = torch.eye(200)  # a product with it changes nothing
# gloo makes a reduce-scatter of an all-reduce, and it is recorded as what passes.
# On two ranks torch has one group of both, which an axis shares with what all agree on.
CASES: dict[str, tuple[dict[str, Any], set[str], set[str]]] = {  # options, kinds, axes
    "data parallel": (DP, {"all_reduce"}, {"data"}),
    SLOW: (DP, {"all_reduce"}, {"data"}),
    "ZeRO-1": (ZERO["ZeRO-1"], {"all_reduce", "all_gather"}, {"data"}),
    "ZeRO-3": (ZERO["ZeRO-3"], {"all_reduce", "all_gather"}, {"data"}),
    "tensor": (TP, {"all_reduce", "all_gather"}, {"tensor"}),
    "tensor and sequence": (
        {**TP, "sequence_parallel": True}, {"all_reduce", "all_gather"}, {"tensor"},
    ),
    "pipeline": (PP, {"all_reduce", "send_recv"}, {"pipeline"}),
    "context, gathered": (
        {"context_parallel_size": 2}, {"all_reduce", "all_gather"}, {"data", "context"},
    ),
    "context, ring": (
        {"context_parallel_size": 2, "context_method": "ring"},
        {"all_reduce", "send_recv"}, {"data", "context"},
    ),
    "experts": (EP, {"all_reduce", "all_to_all"}, {"data", "expert"}),
    FOUR: ({**DP, **TP}, {"all_reduce", "all_gather"}, {"data", "tensor", "agreement"}),
}  # fmt: skip


def beside(ranks: Ranks, *, computes: bool) -> dict[str, float]:
    """Return what the watch says of a late peer's message that is computed beside, or awaited."""
    watch, ones = CollectiveProfiler(ranks, lambda: {dist.group.WORLD.group_name: "data"}), CALM
    for step in range(FIRST_LOOK + 1):
        with watch.step():
            if not ranks.is_lead and step == FIRST_LOOK:
                time.sleep(LATE_SECONDS)
            sending = dist.all_reduce(torch.ones(1000), async_op=True)
            while computes and ranks.is_lead and not sending.is_completed():
                ones = ones @ CALM
            sending.wait()
    return watch.news()


def train(name: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Train one case; the slow peer is late to the step that is looked at."""
    trainer = trainer_of(
        model_of(name), CASES[name][0], ranks, folder,
        max_steps=STEPS, gradient_accumulation_steps=2,
    )  # fmt: skip
    if name == SLOW and ranks.rank == 1:
        make_step = trainer.make_step

        def late() -> dict[str, float]:
            time.sleep(LATE_SECONDS if trainer.state.step == FIRST_LOOK else 0.0)
            return make_step()

        trainer.make_step = late
    trainer.run()
    return {
        "values": trainer.values,
        "figures": trainer.watch.figures(),
        "notes": trainer.watch.notes(),
        "step_seconds": trainer.step_seconds,
    }


def _on_rank(ranks: Ranks, folder: Path) -> None:
    cases = [name for name in CASES if (name == FOUR) == (ranks.size == 4)]
    found = {name: train(name, ranks, folder / f"{name}-{ranks.rank}") for name in cases}
    if ranks.size == 2:
        found["hidden"] = beside(ranks, computes=True)
        found["awaited"] = beside(ranks, computes=False)
    (folder / f"{ranks.size}-{ranks.rank}.json").write_text(json.dumps(found))


def main() -> None:
    """Fork two ranks, which run every case of theirs, and then four."""
    torch.set_num_threads(1)
    import_what_training_imports()
    for size in (2, 4):
        if any(ends := forked(size, lambda ranks: _on_rank(ranks, Path(sys.argv[1])))):
            sys.exit(f"{size} ranks ended with {ends}")


if __name__ == "__main__":
    main()
