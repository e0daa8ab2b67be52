"""Training checkpoints: complete or absent, never partially written.

A checkpoint is a folder of safetensors and one JSON file, written under a temporary name, synced
and renamed. The previous one is removed only once the new one is complete. Weights and states are
unsharded and named, so that any layout of ranks can resume from it.
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
    """Training progress; the data position follows from it and is not stored.

    ``loss_scale`` is the scale of fp16 gradients, 0 without one, and ``scaled_steps`` the steps
    without overflow since it changed. ``best_validation_loss`` is the lowest so far, 0 before the
    first, and ``validations_without_gain`` counts the validations since. ``mixture`` is the
    history of mixture weights: per entry the first row they apply to, then one weight per source.
    ``mixture_reference`` holds the reference losses in nats.
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
        """Convert the lists of JSON to tuples, so that a copy shares nothing mutable."""
        self.mixture = tuple(tuple(each) for each in self.mixture)
        self.mixture_reference = tuple(self.mixture_reference)


class Saved(NamedTuple):
    """The content of a checkpoint: weights by name, optimizer states by name and state."""

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
    """Return the trained weights and the optimizer states by name, as they are now."""
    return trained_weights(model), tensors_of(optimizer, _names(model, optimizer))


def trained_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's trained weights by name, as they are now."""
    return {name: value.detach() for name, value in _trained(model).items()}


def fill_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy trained weights into a model."""
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
    """Write a checkpoint folder atomically; older ones may be removed afterwards.

    If ``write`` fails, for example on a full disk, the partial folder is removed.
    """
    final = folder / f"{PREFIX}{number:08d}"
    building = folder / f".{final.name}-building"
    for partial in folder.glob(f".{PREFIX}*-building"):  # killed writes, of this step or another
        shutil.rmtree(partial, ignore_errors=True)
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

    folders = checkpoints(folder)
    if not folders:
        return None
    weights, optimizer = (load_file(folders[-1] / file) for file in FILES.values())
    state = TrainState(**json.loads((folders[-1] / "state.json").read_text()))
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
    """Return the trained weights; tied ones appear once, frozen ones not at all."""
    matrices = integer_matrices(model).items()
    return learning(model) | {f"{name}.scale": each.scale for name, each in matrices}


def _names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's weights, in its order."""
    names = {id(each): name for name, each in model.named_parameters()}
    return [names[id(each)] for group in optimizer.param_groups for each in group["params"]]


def share_progress(
    ranks: Ranks,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainState | None,
) -> TrainState | None:
    """Copy the lead's weights to every rank, and its optimizer and progress if it resumed."""
    progress = json.loads(ranks.broadcast_from_lead(json.dumps(state and asdict(state)).encode()))
    ranks.copy_from_lead(list(model.parameters()))
    if progress is None:
        return None
    share(ranks, optimizer, _names(model, optimizer))
    return TrainState(**progress)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
