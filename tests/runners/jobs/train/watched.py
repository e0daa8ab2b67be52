"""Trainings of two ranks whose messages are looked at: ``python -m ... FOLDER`` runs them all."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import runners.jobs  # noqa: F401 - quiets the profiler before torch is loaded
from runners.jobs.ranks import Ranks
from tests.runners.jobs.train.forked import forked
from tests.runners.jobs.train.laid_out import (
    DP,
    EP,
    PP,
    TP,
    ZERO,
    import_what_training_imports,
    model_of,
    trainer_of,
)

STEPS = 7
SLOW = "a slow peer"
LATE_SECONDS = 0.5
# gloo makes a reduce-scatter of an all-reduce, and it is recorded as what passes.
CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "data parallel": (DP, {"all_reduce"}),
    SLOW: (DP, {"all_reduce"}),
    "ZeRO-1": (ZERO["ZeRO-1"], {"all_reduce", "all_gather"}),
    "ZeRO-3": (ZERO["ZeRO-3"], {"all_reduce", "all_gather"}),
    "tensor": (TP, {"all_reduce", "all_gather"}),
    "tensor and sequence": ({**TP, "sequence_parallel": True}, {"all_reduce", "all_gather"}),
    "pipeline": (PP, {"all_reduce", "send_recv"}),
    "context, gathered": ({"context_parallel_size": 2}, {"all_reduce", "all_gather"}),
    "context, ring": (
        {"context_parallel_size": 2, "context_method": "ring"}, {"all_reduce", "send_recv"},
    ),
    "experts": (EP, {"all_reduce", "all_to_all"}),
}  # fmt: skip


def train(name: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Train one case; the slow peer is late to every step."""
    trainer = trainer_of(model_of(name), CASES[name][0], ranks, folder, max_steps=STEPS)
    if name == SLOW and ranks.rank == 1:
        make_step = trainer.make_step

        def late() -> dict[str, float]:
            time.sleep(LATE_SECONDS)
            return make_step()

        trainer.make_step = late
    trainer.run()
    return {
        "values": trainer.values,
        "figures": trainer.watch.figures(),
        "note": trainer.watch.note(),
        "step_seconds": trainer.step_seconds,
    }


def _on_rank(ranks: Ranks, folder: Path) -> None:
    found = {name: train(name, ranks, folder / f"{name}-{ranks.rank}") for name in CASES}
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))


def main() -> None:
    """Fork both ranks, which run every case."""
    torch.set_num_threads(1)
    import_what_training_imports()
    if any(ends := forked(2, lambda ranks: _on_rank(ranks, Path(sys.argv[1])))):
        sys.exit(f"the ranks ended with {ends}")


if __name__ == "__main__":
    main()
