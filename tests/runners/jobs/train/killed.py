"""Trainings whose ranks are killed in the middle of a step, and what goes on from what they left.

One process imports the libraries and forks the ranks of each part: undisturbed, killed, resumed.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from runners.jobs.ranks import RankLostError, Ranks
from runners.jobspec import DataParallel
from tests.runners.jobs.train.forked import forked
from tests.runners.jobs.train.laid_out import (
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

KILLED_AT = 3  # steps are behind it, and as many checkpoints
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


def train(name: str, options: dict[str, Any], ranks: Ranks, folder: Path, victim: int) -> Seen:
    """Train to the end, or until the victim kills itself as its next step's products begin."""
    asked = {key: value for key, value in options.items() if key != "left"}
    policy = DataParallel(on_lost_rank="shrink" if "left" in options else "stop")
    trainer = trainer_of(
        model_of(name),
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


def _on_rank(name: str, options: dict[str, Any], ranks: Ranks, said: Path) -> None:
    victim = KILLINGS[name].victim if said.name == "killed" else -1
    folder = said.parent / ("alone" if said.name == "undisturbed" else "work")
    try:
        trainer = train(name, options, ranks, folder, victim)
    except RankLostError as error:
        (said / f"{ranks.rank}.lost").write_text(str(error))
        raise
    found = {
        "losses": [each["loss"] for each in trainer.values],
        "resumed_at_step": trainer.resumed_at_step,
    }
    (said / f"{ranks.rank}.json").write_text(json.dumps(found))


def run(name: str, options: dict[str, Any], said: Path) -> list[int]:
    """Run one part of a case on forked ranks; return how each ended, signals below 0."""
    said.mkdir(parents=True, exist_ok=True)
    return forked(size_of(options), lambda ranks: _on_rank(name, options, ranks, said))


def main() -> None:
    """Run all cases, or those named, below the folder."""
    torch.set_num_threads(1)
    import_what_training_imports()
    folder = Path(sys.argv[1])
    for name, case in KILLINGS.items():
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        parts = {"undisturbed": case.options, "killed": case.options, "resumed": case.then}
        ends, began = {}, time.monotonic()
        for part, options in parts.items():
            ends[part] = run(name, options, folder / name / part)
        ends["seconds"] = time.monotonic() - began
        (folder / name / "ends.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    assert KILLED_AT < STEPS
    main()
