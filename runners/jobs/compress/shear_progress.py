"""How far a pruning by learnt masks is, on disk: whole or not at all, so that a kill costs little.

Weights, optimisers and both random generators are kept, so that a resumed run makes the steps
that an unbroken one would have made.
"""

# mypy: disable-error-code="no-untyped-call"
# safetensors has no types.

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from runners.jobs.train.checkpoint import checkpoints, forget_older, publish_checkpoint

EVERY_SECONDS = 30.0
WRITING_SHARE = 0.05  # of the time at most: large models are written less often
RANDOM = "random"
Phase = Literal["masks", "recovery"]
PHASES: tuple[Phase, ...] = ("masks", "recovery")


class Learner(NamedTuple):
    """Everything that a step changes."""

    modules: Mapping[str, torch.nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]
    random: np.random.Generator


@dataclass
class Progress:
    """The checkpoints of one pruning, of which the newest is read."""

    folder: Path
    every_seconds: float = EVERY_SECONDS
    _next_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        """Begin to count from here."""
        self._next_at = time.monotonic() + self.every_seconds

    @property
    def document(self) -> dict[str, Any]:
        """Return phase, step and figures of the newest checkpoint; nothing where there is none."""
        found = self._newest()
        if found is None:
            return {}
        document: dict[str, Any] = json.loads((found / "state.json").read_text())
        return document

    def resume(self, phase: Phase, learner: Learner) -> int:
        """Fill what the newest checkpoint holds, if it is of the phase; return its steps."""
        document, found = self.document, self._newest()
        if found is None or document["phase"] != phase:
            return 0
        self.fill(learner.modules)
        for name, optimizer in learner.optimizers.items():
            _fill(optimizer, load_file(found / f"{name}.optimizer.safetensors"))
        torch.set_rng_state(load_file(found / f"{RANDOM}.safetensors")[RANDOM])
        learner.random.bit_generator.state = document[RANDOM]
        return int(document["step"])

    def fill(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """Give modules the parameters of the newest checkpoint."""
        found = self._newest()
        if found is None:
            return
        for name, module in modules.items():
            tensors = load_file(found / f"{name}.safetensors")
            with torch.no_grad():
                for key, parameter in module.named_parameters():
                    parameter.copy_(tensors[key])

    def keep(
        self,
        phase: Phase,
        step: int,
        learner: Learner,
        figures: Mapping[str, Any],
        *,
        is_due: bool = False,
    ) -> None:
        """Write where it stands, once enough time has passed or where it ``is_due``."""
        began = time.monotonic()
        if began < self._next_at and not is_due:
            return
        document = {
            "phase": phase, "step": step, RANDOM: learner.random.bit_generator.state, **figures,
        }  # fmt: skip

        def write(building: Path) -> None:
            for name, module in learner.modules.items():
                own = module.named_parameters()
                tensors = {key: each.detach().contiguous() for key, each in own}
                save_file(tensors, building / f"{name}.safetensors")
            for name, optimizer in learner.optimizers.items():
                path = building / f"{name}.optimizer.safetensors"
                save_file(_tensors(optimizer), path)
            save_file({RANDOM: torch.get_rng_state()}, building / f"{RANDOM}.safetensors")
            (building / "state.json").write_text(json.dumps(document))

        publish_checkpoint(self.folder, PHASES.index(phase) * 10_000_000 + step, write)
        forget_older(self.folder)
        ended = time.monotonic()
        self._next_at = ended + max(self.every_seconds, (ended - began) / WRITING_SHARE)

    def _newest(self) -> Path | None:
        return next(iter(checkpoints(self.folder)[-1:]), None)

    def clear(self) -> None:
        """Delete every checkpoint: the pruning is done."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return what an optimiser remembers, by the number of the parameter and the name of it."""
    state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": torch.as_tensor(value).detach().contiguous()
        for index, values in state.items()
        for name, value in values.items()
    }


def _fill(optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    document = optimizer.state_dict()
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        document["state"].setdefault(int(index), {})[name] = value
    optimizer.load_state_dict(document)
