"""A small training on two sources whose weights move, in layouts of real gloo ranks.

One process forks the ranks; each number of ranks leaves what it saw as JSON.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runners.jobs.ranks import Ranks
from runners.jobs.train.rows import DataBatches, Rows, WeightedRows, rows_of, windows_of
from runners.jobs.train.sources import Data, HeldOutRows, Mixture, mixture_of
from runners.jobspec import HostText, MixedData, SampleOptions, TrainSpec, WeightedData
from runners.jobspec.base import FileData, weights_of
from tests.system.jobs.train import laid_out
from tests.system.jobs.train.forked import forked
from tests.system.jobs.train.laid_out import PP, Seen

PADDED = SampleOptions(rows="padded")
# The first is learnt at once; the second has no order, and stays above its reference.
PARTS = (
    WeightedData(data=HostText(), weight=3.0),
    WeightedData(data=FileData(path="noise.txt"), weight=1.0, reference_loss=4.0),
)
MIXED = MixedData(parts=PARTS, weights="dynamic", update_every_steps=2)
CASES: dict[str, dict[str, Any]] = {
    "copies": laid_out.DP, "ZeRO-3": laid_out.ZERO["ZeRO-3"], "tensor": laid_out.TP,
    "pipeline": PP,
}  # fmt: skip
STEPS = 5  # with two updates of the weights
BROKEN_OFF = 3  # after how many steps the chain goes on with other ranks: between two updates


class Drawn(DataBatches):
    """Micro-batches that remember what was drawn of which."""

    def __init__(self, streams: Sequence[WeightedRows], spec: TrainSpec) -> None:
        self.seen: dict[str, list[int]] = {}
        super().__init__(streams, spec, 0)

    def micro_batch(self, step: int, micro_step: int) -> Any:
        found = super().micro_batch(step, micro_step)
        self.seen[f"{step}.{micro_step}"] = found.input_ids.flatten().tolist()
        return found


def rows_between(ids: np.ndarray, begin: int, end: int) -> Rows:
    return rows_of(*windows_of(ids[begin:end], 16), 16, PADDED)


def sources() -> list[np.ndarray]:
    """Return numbers that repeat themselves, and numbers without an order."""
    even = np.tile(np.arange(24, dtype=np.int32) * 5, 150)
    return [even, np.random.default_rng(3).integers(0, 128, size=3600).astype(np.int32)]


def mixture(spec: TrainSpec) -> tuple[Drawn, Mixture]:
    """Return the batches of the two sources, and what moves their weights."""
    learnt = [rows_between(ids, 0, 3000) for ids in sources()]
    kept = [HeldOutRows([rows_between(ids, 3000, 3130)]) for ids in sources()]
    weights = weights_of(spec.data)
    batches = Drawn([WeightedRows(*each) for each in zip(learnt, weights, strict=True)], spec)
    data = Data(batches, by_source=list(zip(("even", "noise"), kept, strict=True)))
    found = mixture_of(data, spec)
    assert found is not None
    return batches, found


def mixed_trainer(options: dict[str, Any] | None, ranks: Ranks, folder: Path) -> Seen:
    """Return a trainer of the two sources in a layout."""
    trainer = laid_out.trainer_of(
        "llama", options, ranks, folder, data=MIXED, samples=PADDED, max_steps=STEPS
    )  # fmt: skip
    trainer.batches, trainer.evaluator.mixture = mixture(trainer.spec)
    return trainer


def run_case(
    options: dict[str, Any] | None, ranks: Ranks, folder: Path, stop_at: int = 0
) -> dict[str, Any]:
    """Train, and return the losses, the weights that were in force and the rows that came."""
    trainer = mixed_trainer(options, ranks, folder)
    trainer.stop_at = stop_at
    trainer.resume()
    trainer.run()
    return {
        "losses": [each["loss"] for each in trainer.values],
        "history": trainer.state.mixture,
        "reference": trainer.state.mixture_reference,
        "rows": trainer.batches.seen,
    }


def _on_rank(ranks: Ranks, folder: Path) -> None:
    found = {name: run_case(options, ranks, folder / name) for name, options in CASES.items()}
    found["chain"] = run_case(PP, ranks, folder / "chain")
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))


def main() -> None:
    """Run every layout on two ranks, below the folder."""
    torch.set_num_threads(1)
    laid_out.import_what_training_imports()
    folder = Path(sys.argv[1])
    if any(ends := forked(2, lambda ranks: _on_rank(ranks, folder))):
        sys.exit(f"2 ranks ended with {ends}")


if __name__ == "__main__":
    main()
