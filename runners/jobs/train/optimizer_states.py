"""What an optimiser remembers, as named tensors: to be written, read again and shared.

Whatever it keeps for a weight is taken as it is, so that any optimiser goes on to the bit: 8-bit
moments with their scales, rows and columns, counts of steps, moments in a mapped file.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch

from runners.jobs.ranks import Ranks
from runners.jobs.train.away_states import AwayAdamW

NUMBERS = {"int": int, "float": float}  # what is kept as a plain number comes back as one


def tensors_of(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the states as ``weight's name.state's name``; none shares memory with another.

    ``names`` are the weights' in the optimiser's order.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for weight, parameter in zip(names, _weights(optimizer), strict=True):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensor = value.detach().contiguous()
                address = tensor.data_ptr()
                found[f"{weight}.{name}"] = tensor.clone() if address in seen else tensor
                seen.add(address)
            elif value is not None:
                kind = type(value).__name__
                found[f"{weight}.{name}#{kind}"] = torch.tensor(NUMBERS[kind](value))
    return found


def fill(
    optimizer: torch.optim.Optimizer, names: Sequence[str], tensors: dict[str, torch.Tensor]
) -> None:
    """Give an optimiser of the same weights what another one kept."""
    weights = dict(zip(names, _weights(optimizer), strict=True))
    for key, value in tensors.items():
        weight, _, kept = key.rpartition(".")
        name, _, kind = kept.partition("#")
        state = _state(optimizer, weights[weight])
        if kind:
            state[name] = NUMBERS[kind](value.item())
        elif isinstance(state.get(name), torch.Tensor):
            state[name].copy_(value)
        else:
            state[name] = value.to(weights[weight].device)


def share(ranks: Ranks, optimizer: torch.optim.Optimizer, names: Sequence[str]) -> None:
    """Give every rank's optimiser what the lead's keeps.

    Raises:
        RankLostError: not every rank answered in time.
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
    """Return the lead's JSON document: first its length is told, then its bytes."""
    text = bytearray(json.dumps(document).encode())
    length = torch.tensor([len(text)])
    ranks.copy_from_lead([length])
    data = torch.zeros(int(length), dtype=torch.uint8)
    if ranks.is_lead:
        data = torch.frombuffer(text, dtype=torch.uint8)
    ranks.copy_from_lead([data])
    found: dict[str, Any] = json.loads(bytes(data.tolist()))
    return found


def _described(tensor: torch.Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _empty(dtype: str, shape: list[int]) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))


def _weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _state(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> dict[str, Any]:
    if isinstance(optimizer, AwayAdamW):
        return optimizer.state_of(weight)
    state: dict[str, Any] = optimizer.state[weight]
    return state
