"""Trainings whose ranks are killed in the middle of a step, and what goes on from what they left.

One process imports the libraries and forks the ranks: one that trains undisturbed, those of each
case that is killed, and for each number of ranks those that go on with what all cases left.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from runners.jobs.ranks import RankFailedError, Ranks
from runners.jobspec import DataParallel
from tests.system.jobs.train.forked import forked
from tests.system.jobs.train.laid_out import (
    PP,
    SHARED,
    STEPS,
    TP,
    ZERO,
    Seen,
    import_what_training_imports,
    model_of,
    trainer_of,
)

KILLED_AT = 2  # steps are behind it, and as many checkpoints
EVERY_STEP = 1e-6  # seconds between checkpoints


class Killing(NamedTuple):
    """A layout, which of its ranks is killed, and in which layout the training goes on."""

    options: dict[str, Any]
    victim: int
    then: dict[str, Any]


def size_of(options: dict[str, Any]) -> int:
    """Return how many ranks take part: those that are left, or as many as a layout takes."""
    if "left" in options:
        return int(options["left"])
    sizes = (value for name, value in options.items() if name.endswith("_parallel_size"))
    apart = 1
    for value in sizes:
        apart *= value
    return apart // options.get("expert_parallel_size", 1)


FOUR = {"data_parallel_size": 4, "zero_stage": 3}
CONTEXT = {"context_parallel_size": 2, "context_method": "ring"}
SHRUNK = {"pipeline_parallel_size": 4, "left": 3}  # the job's layout is for 4, and 3 are left
UNEVEN = {**PP, "pipeline_layers": (1, 3)}
KILLINGS = {
    **{name: Killing(options, 1, options) for name, options in SHARED.items()},
    "ZeRO-3, its lead": Killing(ZERO["ZeRO-3"], 0, ZERO["ZeRO-3"]),
    "context": Killing(CONTEXT, 1, CONTEXT),
    "tensor and pipeline": Killing({**TP, **PP}, 2, {**TP, **PP}),
    "a pipeline that shrinks": Killing({"pipeline_parallel_size": 4}, 2, SHRUNK),
    "uneven stages, then even ones": Killing(UNEVEN, 0, PP),
    "ZeRO-3 from 4 ranks to 2": Killing(FOUR, 3, ZERO["ZeRO-3"]),
    "ZeRO-3 from 4 ranks to one": Killing(FOUR, 1, {}),
}


def train(model: str, options: dict[str, Any], ranks: Ranks, folder: Path, victim: int) -> Seen:
    """Train to the end, or until the victim kills itself as its next step's products begin."""
    asked = {key: value for key, value in options.items() if key != "left"}
    policy = DataParallel(on_lost_rank="shrink" if "left" in options else "stop")
    trainer = trainer_of(
        model,
        asked or None,
        ranks,
        folder,
        checkpoint_every_seconds=EVERY_STEP,
        checkpoint_writing="in_step",  # the last one is that of the last step
        parallel=policy,
    )

    def kill(*_args: object) -> None:
        if trainer.state.step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    if ranks.rank == victim:
        for part in getattr(trainer.layout, "stages", [trainer.model]):
            part.register_forward_pre_hook(kill)
    trainer.resume()
    trainer.run()
    return trainer


def _say(trainer: Seen, ranks: Ranks, said: Path) -> None:
    found = {
        "losses": [each["loss"] for each in trainer.values],
        "resumed_at_step": trainer.resumed_at_step,
    }
    said.mkdir(parents=True, exist_ok=True)
    (said / f"{ranks.rank}.json").write_text(json.dumps(found))


def _undisturbed(ranks: Ranks, folder: Path, models: set[str]) -> None:
    """Train each model in one process, which is what every layout learns (test_equality)."""
    for model in models:
        said = folder / model / "undisturbed"
        _say(train(model, {}, ranks, said / "work", -1), ranks, said)


def _killed(name: str, ranks: Ranks, folder: Path) -> None:
    case, said = KILLINGS[name], folder / name / "killed"
    try:
        train(model_of(name), case.options, ranks, folder / name / "work", case.victim)
    except RankFailedError as error:
        (said / f"{ranks.rank}.lost").write_text(str(error))
        raise


def _resumed(names: Sequence[str], ranks: Ranks, folder: Path) -> None:
    """Train what each case left to its end, all cases on the same ranks."""
    for name in names:
        work = folder / name / "work"
        trainer = train(model_of(name), KILLINGS[name].then, ranks, work, -1)
        _say(trainer, ranks, folder / name / "resumed")


def kill(name: str, folder: Path) -> None:
    """Kill a rank of a case's layout; note how each rank ended, signals below 0."""
    said, began = folder / name / "killed", time.monotonic()
    said.mkdir(parents=True)
    ends = forked(size_of(KILLINGS[name].options), lambda ranks: _killed(name, ranks, folder))
    found = {"killed": ends, "seconds": time.monotonic() - began}
    (folder / name / "ends.json").write_text(json.dumps(found))


def main() -> None:
    """Run all cases, or those named, below the folder."""
    torch.set_num_threads(1)
    import_what_training_imports()
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(KILLINGS)
    models = {model_of(name) for name in names}
    ends = forked(1, lambda ranks: _undisturbed(ranks, folder, models))
    for name in names:
        kill(name, folder)
    for size in {size_of(KILLINGS[name].then) for name in names}:
        alike = [name for name in names if size_of(KILLINGS[name].then) == size]
        ends += forked(size, lambda ranks, alike=alike: _resumed(alike, ranks, folder))
    if any(ends):
        sys.exit(f"ranks that nobody killed ended with {ends}")


if __name__ == "__main__":
    assert KILLED_AT < STEPS
    main()
