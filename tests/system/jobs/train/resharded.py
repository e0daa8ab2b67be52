"""Trainings that go on from checkpoints of 4 ranks on 2 of them, and then on one.

``python -m tests.system.jobs.train.resharded FOLDER``: each case is one training in three parts.
The last case's ranks are on two hosts with folders of their own, of which the first is lost and
comes back.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from runners.jobs.ranks import Ranks
from tests.system.jobs.train.forked import forked
from tests.system.jobs.train.laid_out import (
    BROKEN_OFF,
    DP,
    EP,
    PP,
    TP,
    ZERO,
    import_what_training_imports,
    model_of,
    run_case,
)


class Part(NamedTuple):
    """A layout, and the host of each of its ranks."""

    options: dict[str, Any]
    hosts: tuple[str, ...]


def _on_one_host(four: dict[str, Any], two: dict[str, Any]) -> tuple[Part, ...]:
    return Part(four, ("north",) * 4), Part(two, ("north",) * 2), Part({}, ("north",))


FOUR = {"data_parallel_size": 4}
ON_TWO_HOSTS = ("north", "north", "south", "south")
CASES: dict[str, tuple[Part, ...]] = {
    "data parallel": _on_one_host(FOUR, DP),
    "ZeRO-3": _on_one_host({**FOUR, "zero_stage": 3}, ZERO["ZeRO-3"]),
    "ZeRO-1 and tensor": _on_one_host({**ZERO["ZeRO-1"], **TP}, TP),
    "tensor and pipeline": _on_one_host({**TP, **PP}, PP),
    "experts and data": _on_one_host({**EP, **FOUR}, EP),
    "copies on two hosts": (
        Part(FOUR, ON_TWO_HOSTS), Part(DP, ("south",) * 2), Part(FOUR, ON_TWO_HOSTS),
    ),
    "slices on two hosts": (
        Part({**TP, **PP}, ON_TWO_HOSTS), Part(PP, ("south",) * 2), Part({**TP, **PP}, ON_TWO_HOSTS),
    ),
}  # fmt: skip
PARTS = (0, 1, 2)


def _on_rank(ranks: Ranks, folder: Path, at: int) -> None:
    found: dict[str, list[float]] = {}
    for name, parts in CASES.items():
        options, hosts = parts[at]
        if len(hosts) == ranks.size:
            work = folder / hosts[ranks.rank] / name
            stop_at = [*BROKEN_OFF, 0][at]
            found[name] = run_case(model_of(name), options or None, ranks, work, stop_at)["losses"]
    (folder / f"{at}-{ranks.size}-{ranks.rank}.json").write_text(json.dumps(found))


def main() -> None:
    """Run the parts one after the other, below the folder."""
    torch.set_num_threads(1)
    import_what_training_imports()
    folder = Path(sys.argv[1])
    for at in PARTS:
        for size in sorted({len(parts[at].hosts) for parts in CASES.values()}):
            if any(ends := forked(size, lambda ranks, at=at: _on_rank(ranks, folder, at))):
                sys.exit(f"{size} ranks of part {at} ended with {ends}")


if __name__ == "__main__":
    main()
