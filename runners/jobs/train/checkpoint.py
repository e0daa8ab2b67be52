"""Training checkpoints: complete or absent, never half written.

A checkpoint is a folder of safetensors and one JSON file, written aside, synced and renamed.
After a kill the newest complete one is read; its predecessor goes only once it stands. Weights
and states are whole and under their names, so that any layout of ranks goes on from it.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from runners.jobs.ranks import Ranks
from runners.jobs.train.integers import integer_matrices, learning
from runners.jobs.train.optimizer_states import fill, share, tensors_of

PREFIX = "step-"
FILES = {"weights": "model.safetensors", "optimizer": "optimizer.safetensors"}


@dataclass
class TrainState:
    """How far training is; the batches follow from this, so no data position is kept.

    ``loss_scale`` is that of fp16 gradients, which ``scaled_steps`` have met without overflow; 0
    without one. ``best_validation_loss`` is the least so far, 0 before there was one, and
    ``validations_without_gain`` is how many came since. ``mixture`` is the history of weights
    that moved, each since which of the run's rows it is in force, then one of each source;
    ``mixture_reference`` are the losses, in nats, that they follow.
    """

    step: int = 0
    tokens: int = 0
    elapsed_seconds: float = 0.0
    loss_scale: float = 0.0
    scaled_steps: int = 0
    best_validation_loss: float = 0.0
    validations_without_gain: int = 0
    mixture: tuple[tuple[float, ...], ...] = ()
    mixture_reference: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Take lists, as JSON has them, for tuples: a copy then shares nothing that changes."""
        self.mixture = tuple(tuple(each) for each in self.mixture)
        self.mixture_reference = tuple(self.mixture_reference)


class Saved(NamedTuple):
    """What a checkpoint holds: weights by name, the optimiser's states by name and state."""

    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    state: TrainState


def save_checkpoint(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: TrainState
) -> Path:
    """Write one checkpoint and return its folder."""
    return write_checkpoint(folder, Saved(*tables_of(model, optimizer), state))


def tables_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the trained weights and the optimiser's states by name, as they are now."""
    return trained_weights(model), tensors_of(optimizer, _names(model, optimizer))


def trained_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what training changes of a model by name, as it is now."""
    return {name: value.detach() for name, value in _trained(model).items()}


def fill_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Give a model what training had changed."""
    with torch.no_grad():
        for name, parameter in _trained(model).items():
            parameter.copy_(weights[name])


def write_checkpoint(folder: Path, saved: Saved) -> Path:
    """Write one checkpoint and return its folder."""
    from safetensors.torch import save_file

    def write(building: Path) -> None:
        for name in ("weights", "optimizer"):
            tensors = {key: each.contiguous() for key, each in getattr(saved, name).items()}
            save_file(tensors, building / FILES[name])
        (building / "state.json").write_text(json.dumps(asdict(saved.state)))

    return publish_checkpoint(folder, saved.state.step, write)


def publish_checkpoint(folder: Path, number: int, write: Callable[[Path], None]) -> Path:
    """Put what ``write`` leaves in a folder in its place whole; those before may go then.

    What could not be written whole, as on a full disk, is removed; the newest before it stands.
    """
    final = folder / f"{PREFIX}{number:08d}"
    building = folder / f".{final.name}-building"
    for cut_short in folder.glob(f".{PREFIX}*-building"):  # by a kill, at this step or another
        shutil.rmtree(cut_short, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        write(building)
        for path in building.iterdir():
            _sync(path)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    shutil.rmtree(final, ignore_errors=True)
    building.rename(final)
    _sync(folder)
    return final


def forget_older(folder: Path, keep: int = 1) -> None:
    """Remove all but the newest ``keep`` checkpoints."""
    for older in checkpoints(folder)[:-keep]:
        shutil.rmtree(older, ignore_errors=True)


def read_latest(folder: Path) -> Saved | None:
    """Return the newest checkpoint, or None."""
    from safetensors.torch import load_file

    found = checkpoints(folder)
    if not found:
        return None
    weights, optimizer = (load_file(found[-1] / file) for file in FILES.values())
    state = TrainState(**json.loads((found[-1] / "state.json").read_text()))
    return Saved(weights, optimizer, state)


def load_latest(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> TrainState | None:
    """Fill model and optimizer from the newest checkpoint; return its state, or None."""
    saved = read_latest(folder)
    if saved is None:
        return None
    fill_weights(model, saved.weights)
    fill(optimizer, _names(model, optimizer), saved.optimizer)
    return saved.state


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if path.is_dir())


def _trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return what training changes; tied weights appear once, and frozen ones lie elsewhere."""
    matrices = integer_matrices(model).items()
    return learning(model) | {f"{name}.scale": each.scale for name, each in matrices}


def _names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimiser's weights, in its order."""
    names = {id(each): name for name, each in model.named_parameters()}
    return [names[id(each)] for group in optimizer.param_groups for each in group["params"]]


def share_progress(
    ranks: Ranks,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainState | None,
) -> TrainState | None:
    """Give every rank the lead's weights, and its optimizer and progress where it resumed."""
    told = json.loads(ranks.told_by_lead(json.dumps(state and asdict(state)).encode()))
    ranks.copy_from_lead(list(model.parameters()))
    if told is None:
        return None
    share(ranks, optimizer, _names(model, optimizer))
    return TrainState(**told)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
