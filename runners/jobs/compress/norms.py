"""Norm tweaking: fit the norms of a quantised layer to the float layer's outputs.

A few passes of Adam over the calibration text match the mean and variance of each output channel
to those of the float layer on the same inputs. Only norms are trained.
Source: Li et al. 2023, arXiv:2309.02784, algorithm 1 and equation 3.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from runners.jobs.layers import SEQUENCES_AT_ONCE, Extra, Hidden

Values = Mapping[str, torch.Tensor]


class Passage(NamedTuple):
    """Inputs of a layer, its other call arguments, and the float layer's outputs."""

    inputs: Hidden
    extra: Extra
    wanted: Hidden

    def batches(self) -> list[tuple[Hidden, Hidden]]:
        """Return (inputs, float outputs) in batches of sequences."""
        parts = (torch.split(each, SEQUENCES_AT_ONCE) for each in (self.inputs, self.wanted))
        return list(zip(*parts, strict=True))


def tweak_norms(
    layer: torch.nn.Module, passage: Passage, *, passes: int, learning_rate: float
) -> dict[str, float]:
    """Train the layer's norms, keep the pass of least loss; return the loss before and after.

    If no pass improves the loss, the norms are unchanged.
    """
    dtypes = {name: each.dtype for name, each in norm_weights(layer).items()}
    values = {
        name: each.detach().float().clone().requires_grad_()
        for name, each in norm_weights(layer).items()
    }
    optimiser = torch.optim.Adam(values.values(), lr=learning_rate)
    best = _stored(values, dtypes)
    before = least = _loss(layer, best, passage)
    for _ in range(passes):
        for inputs, wanted in passage.batches():
            _step(layer, values, dtypes, (inputs, passage.extra, wanted), optimiser)
        candidate = _stored(values, dtypes)
        loss = _loss(layer, candidate, passage)
        if loss < least:
            best, least = candidate, loss
    layer.load_state_dict(best, strict=False)
    return {"norm_loss_before": before, "norm_loss": least}


def norm_weights(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the layer's norm parameters by name."""
    return {
        f"{name}.{own}": parameter
        for name, module in layer.named_modules()
        if type(module).__name__.endswith("Norm")
        for own, parameter in module.named_parameters(recurse=False)
    }


def channel_loss(found: Hidden, wanted: Hidden) -> torch.Tensor:
    """Return the mean absolute difference of the channels' means and variances over all tokens."""
    found, wanted = (each.float().flatten(0, -2) for each in (found, wanted))
    means = (found.mean(dim=0) - wanted.mean(dim=0)).abs()
    variances = (found.var(dim=0) - wanted.var(dim=0)).abs()
    return (means + variances).mean()


def _step(
    layer: torch.nn.Module,
    values: Values,
    dtypes: Mapping[str, torch.dtype],
    batch: tuple[Hidden, Extra, Hidden],
    optimiser: torch.optim.Optimizer,
) -> None:
    inputs, extra, wanted = batch
    with torch.enable_grad():
        cast = {name: each.to(dtypes[name]) for name, each in values.items()}
        loss = channel_loss(_forward(layer, cast, inputs, extra), wanted)
        gradients = torch.autograd.grad(loss, list(values.values()))
    for value, gradient in zip(values.values(), gradients, strict=True):
        value.grad = gradient
    optimiser.step()


@torch.no_grad()
def _loss(layer: torch.nn.Module, values: Values, passage: Passage) -> float:
    losses = [
        channel_loss(_forward(layer, values, inputs, passage.extra), wanted)
        for inputs, wanted in passage.batches()
    ]
    return float(torch.stack(losses).mean())


def _forward(layer: torch.nn.Module, values: Values, inputs: Hidden, extra: Extra) -> Hidden:
    result = torch.func.functional_call(layer, dict(values), (inputs,), dict(extra))
    outputs: Hidden = result[0] if isinstance(result, tuple) else result
    return outputs


def _stored(values: Values, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """Return the values cast to their storage dtypes."""
    return {name: each.detach().to(dtypes[name]).clone() for name, each in values.items()}
