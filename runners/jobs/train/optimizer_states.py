"""Optimizer states as named tensors, to be saved, loaded and shared between ranks.

All state of a weight is taken as it is, so that any optimizer resumes bit-exactly: 8-bit moments
with their scales, factored moments, step counts, moments in a mapped file.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch

from runners.jobs.ranks import Ranks
from runners.jobs.train.offloaded_adamw import OffloadedAdamW

NUMBERS = {"int": int, "float": float}  # plain numbers are restored as such


def tensors_of(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the states as ``<weight name>.<state name>``; none shares memory with another.

    ``names`` are the weights' names, in the optimizer's order.
    """
    tensors: dict[str, torch.Tensor] = {}
    addresses: set[int] = set()
    for weight, parameter in zip(names, _weights(optimizer), strict=True):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensor = value.detach().contiguous()
                address = tensor.data_ptr()
                tensors[f"{weight}.{name}"] = tensor.clone() if address in addresses else tensor
                addresses.add(address)
            elif value is not None:
                kind = type(value).__name__
                tensors[f"{weight}.{name}#{kind}"] = torch.tensor(NUMBERS[kind](value))
    return tensors


def fill(
    optimizer: torch.optim.Optimizer, names: Sequence[str], tensors: dict[str, torch.Tensor]
) -> None:
    """Load states into an optimizer of the same weights."""
    weights = dict(zip(names, _weights(optimizer), strict=True))
    for key, value in tensors.items():
        weight, _, state_key = key.rpartition(".")
        name, _, kind = state_key.partition("#")
        state = _state(optimizer, weights[weight])
        if kind:
            state[name] = NUMBERS[kind](value.item())
        elif isinstance(state.get(name), torch.Tensor):
            state[name].copy_(value)
        else:
            state[name] = value.to(weights[weight].device)


def share(ranks: Ranks, optimizer: torch.optim.Optimizer, names: Sequence[str]) -> None:
    """Copy the lead's optimizer states to every rank.

    Raises:
        RankFailedError: not every rank responded in time.
    """
    tensors = tensors_of(optimizer, names) if ranks.is_lead else {}
    described = {name: _described(each) for name, each in tensors.items()}
    shapes = _from_lead(ranks, described)
    if not ranks.is_lead:
        tensors = {name: _empty(*shape) for name, shape in shapes.items()}
    ranks.copy_from_lead([tensors[name] for name in sorted(tensors)])
    if not ranks.is_lead:
        fill(optimizer, names, tensors)


def _from_lead(ranks: Ranks, document: dict[str, Any]) -> dict[str, Any]:
    """Broadcast the lead's JSON document: its length first, then its bytes."""
    text = bytearray(json.dumps(document).encode())
    length = torch.tensor([len(text)])
    ranks.copy_from_lead([length])
    data = torch.zeros(int(length), dtype=torch.uint8)
    if ranks.is_lead:
        data = torch.frombuffer(text, dtype=torch.uint8)
    ranks.copy_from_lead([data])
    received: dict[str, Any] = json.loads(bytes(data.tolist()))
    return received


def _described(tensor: torch.Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _empty(dtype: str, shape: list[int]) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))


def _weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _state(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> dict[str, Any]:
    if isinstance(optimizer, OffloadedAdamW):
        return optimizer.state_of(weight)
    state: dict[str, Any] = optimizer.state[weight]
    return state
