"""Dynamic 8-bit quantisation of linear-layer inputs with one scale per token."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

LOWEST, HIGHEST = -128, 127


@contextmanager
def rounded_inputs(linears: Iterable[torch.nn.Linear]) -> Iterator[None]:
    """Quantise the inputs of the linear layers inside the block."""
    with ExitStack() as hooks:
        for linear in linears:
            hooks.callback(linear.register_forward_pre_hook(_round_first).remove)
        yield


def rounded_by_token(inputs: torch.Tensor) -> torch.Tensor:
    """Return inputs [..., in] quantised to 8-bit integers per token and dequantised."""
    largest = inputs.abs().amax(dim=-1, keepdim=True)
    scales = largest / ((HIGHEST - LOWEST) / 2)
    scales = torch.where(scales == 0, torch.finfo(scales.dtype).eps, scales)
    return (inputs / scales).round().clamp(LOWEST, HIGHEST) * scales


def _round_first(_module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return rounded_by_token(inputs[0]), *inputs[1:]
