"""Training checkpoints: complete or absent, never half written.

A checkpoint is a folder of safetensors and one JSON file, written aside, synced and renamed.
After a kill the newest complete one is read; its predecessor goes only once it stands.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from runners.jobs.ranks import Ranks

PREFIX = "step-"


@dataclass
class TrainState:
    """How far training is; the batches follow from the step, so no data position is kept."""

    step: int = 0
    tokens: int = 0
    elapsed_seconds: float = 0.0


def save_checkpoint(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: TrainState
) -> Path:
    """Write one checkpoint and return its folder."""
    from safetensors.torch import save_file

    final = folder / f"{PREFIX}{state.step:08d}"
    building = folder / f".{final.name}-building"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    weights = {name: value.detach().contiguous() for name, value in _trained(model).items()}
    save_file(weights, building / "model.safetensors")
    save_file(_optimizer_tensors(optimizer), building / "optimizer.safetensors")
    (building / "state.json").write_text(json.dumps(asdict(state)))
    for path in building.iterdir():
        _sync(path)
    shutil.rmtree(final, ignore_errors=True)
    building.rename(final)
    _sync(folder)
    for older in checkpoints(folder)[:-1]:
        shutil.rmtree(older, ignore_errors=True)
    return final


def load_latest(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> TrainState | None:
    """Fill model and optimizer from the newest checkpoint; return its state, or None."""
    from safetensors.torch import load_file

    found = checkpoints(folder)
    if not found:
        return None
    weights = load_file(found[-1] / "model.safetensors")
    with torch.no_grad():
        for name, parameter in _trained(model).items():
            parameter.copy_(weights[name])
    _fill_optimizer(optimizer, load_file(found[-1] / "optimizer.safetensors"))
    return TrainState(**json.loads((found[-1] / "state.json").read_text()))


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if path.is_dir())


def _trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return what training changes; tied weights appear once, and frozen ones lie elsewhere."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": torch.as_tensor(value).detach().contiguous()
        for index, values in state.items()
        for name, value in values.items()
    }


def share_progress(
    ranks: Ranks, model: torch.nn.Module, optimizer: torch.optim.AdamW, state: TrainState | None
) -> TrainState | None:
    """Give every rank the lead's weights, and its optimizer and progress where it resumed."""
    mine = [float(value) for value in asdict(state).values()] if state else [0.0] * 3
    is_resumed, step, tokens, elapsed = ranks.total(
        [float(state is not None), *mine] if ranks.is_lead else [0.0] * 4
    )
    ranks.copy_from_lead(list(model.parameters()))
    if not is_resumed:
        return None
    moments = _optimizer_tensors(optimizer) if ranks.is_lead else _empty_moments(optimizer)
    ranks.copy_from_lead([moments[name] for name in sorted(moments)])
    if not ranks.is_lead:
        _fill_optimizer(optimizer, moments)
    return TrainState(int(step), int(tokens), elapsed)


def _empty_moments(optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """Return AdamW's tensors for a rank that has made no step, to be overwritten."""
    found: dict[str, torch.Tensor] = {}
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for index, parameter in enumerate(parameters):
        found[f"{index}.step"] = torch.zeros(())
        found[f"{index}.exp_avg"] = torch.zeros_like(parameter)
        found[f"{index}.exp_avg_sq"] = torch.zeros_like(parameter)
    return found


def _fill_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    document = optimizer.state_dict()
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        document["state"].setdefault(int(index), {})[name] = value
    optimizer.load_state_dict(document)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
