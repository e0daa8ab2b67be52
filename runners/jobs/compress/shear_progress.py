"""Atomic checkpoints of pruning by learnt masks, so that a killed job can resume.

They hold weights, optimiser state and both random generators, so a resumed run takes the same
steps as an uninterrupted one.
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
WRITING_SHARE = 0.05  # largest share of the time spent writing: large models are saved less often
RANDOM = "random"
Phase = Literal["masks", "recovery"]
PHASES: tuple[Phase, ...] = ("masks", "recovery")


class Learner(NamedTuple):
    """The state that a training step changes."""

    modules: Mapping[str, torch.nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]
    random: np.random.Generator


@dataclass
class Progress:
    """Checkpoints of one pruning run; reads use the newest."""

    folder: Path
    every_seconds: float = EVERY_SECONDS
    _next_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        """Schedule the first checkpoint."""
        self._next_at = time.monotonic() + self.every_seconds

    @property
    def document(self) -> dict[str, Any]:
        """Return phase, step and figures of the newest checkpoint; empty if there is none."""
        checkpoint = self._newest()
        if checkpoint is None:
            return {}
        document: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
        return document

    def resume(self, phase: Phase, learner: Learner) -> int:
        """Load the newest checkpoint if it is of the phase; return its step, else 0."""
        document, checkpoint = self.document, self._newest()
        if checkpoint is None or document["phase"] != phase:
            return 0
        self.fill(learner.modules)
        for name, optimizer in learner.optimizers.items():
            _fill(optimizer, load_file(checkpoint / f"{name}.optimizer.safetensors"))
        torch.set_rng_state(load_file(checkpoint / f"{RANDOM}.safetensors")[RANDOM])
        learner.random.bit_generator.state = document[RANDOM]
        return int(document["step"])

    def fill(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """Load the parameters of the newest checkpoint into modules."""
        checkpoint = self._newest()
        if checkpoint is None:
            return
        for name, module in modules.items():
            tensors = load_file(checkpoint / f"{name}.safetensors")
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
        """Write a checkpoint if the interval has passed or ``is_due`` is set."""
        started = time.monotonic()
        if started < self._next_at and not is_due:
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
        finished = time.monotonic()
        self._next_at = finished + max(self.every_seconds, (finished - started) / WRITING_SHARE)

    def _newest(self) -> Path | None:
        return next(iter(checkpoints(self.folder)[-1:]), None)

    def clear(self) -> None:
        """Delete every checkpoint."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return an optimiser's state tensors as ``{parameter index}.{state name}``."""
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
