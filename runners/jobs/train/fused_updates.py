"""Optimisers that update a weight as soon as its gradient is there, and let the gradient go.

No more than the gradients of one operator are held at a time. What needs all gradients at once
is not to be had: the gradient's norm is clipped tensor by tensor, a step has one micro-batch.
A tied weight's gradient is complete before it is used: autograd adds up what its places gave.

Source: Lv et al. 2023 (LOMO), arXiv:2306.09782; Lv et al. 2023 (AdaLomo), arXiv:2310.10195,
algorithm 1.
"""

# mypy: disable-error-code="no-untyped-call"
# torch leaves its hooks without types.

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from runners.jobs.memory import tensor_bytes

MAX_TENSOR_NORM = 1.0
SECOND_MOMENT_DECAY = 0.99  # AdaLomo's beta
SMALLEST = 1e-12
SMALLEST_SCALE = 1e-3  # of a weight's root mean square, so that zeros can move


class FusedUpdate(torch.optim.Optimizer):
    """What hooks of the backward pass do; ``step`` has nothing left to do.

    The learning rate of the groups is read when a gradient arrives: set it before the passes.
    ``peak_gradient_bytes`` is the most that gradients held at once since it was last set to 0.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], learning_rate: float) -> None:
        """Hook every weight."""
        super().__init__(groups, {"lr": learning_rate, "weight_decay": 0.0})
        self.peak_gradient_bytes = 0
        self._squares = 0.0
        self._trained = [each for group in self.param_groups for each in group["params"]]
        for group in self.param_groups:
            for parameter in group["params"]:
                self._hook(parameter, group)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch has overloads
        """Do nothing: the backward pass has updated every weight."""
        return closure() if closure is not None else None

    def norm(self) -> float:
        """Return the norm of the gradients that came since it was last asked for."""
        squares, self._squares = self._squares, 0.0
        return math.sqrt(squares)

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
        """Change a weight by its gradient."""
        raise NotImplementedError

    def take(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Change a weight by its gradient, clipped to a norm, and let it decay."""
        norm = float(gradient.norm())
        self._squares += norm * norm
        if math.isfinite(norm):  # else the loss is none either, and the run ends
            gradient.mul_(min(1.0, MAX_TENSOR_NORM / (norm + SMALLEST)))
            parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
            self.update(parameter, gradient, group["lr"])

    def _hook(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        def arrived(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if gradient is None:
                return
            self._note_held(0)
            with torch.no_grad():
                self.take(parameter, gradient, group)
            parameter.grad = None

        given: Any = parameter  # the hook's method is without types
        given.register_post_accumulate_grad_hook(arrived)

    def _note_held(self, beside: int) -> None:
        """Remember how many bytes of gradients are held, ``beside`` those that autograd keeps."""
        held = sum(tensor_bytes(each.grad) for each in self._trained if each.grad is not None)
        self.peak_gradient_bytes = max(self.peak_gradient_bytes, held + beside)


class Lomo(FusedUpdate):
    """Plain gradient descent, fused: no state at all."""

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
        """Go down the gradient."""
        parameter.add_(gradient, alpha=-rate)


class AdaLomo(FusedUpdate):
    """An adaptive rate from a row and a column of mean squares for each matrix.

    The update's root mean square is at most 1 and is scaled by that of the weight.
    """

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
        """Go down the gradient, each weight at its own rate."""
        state, square = self.state[parameter], gradient.square()
        step = state["step"] = state.get("step", 0) + 1
        kept = SECOND_MOMENT_DECAY if step > 1 else 0.0
        if gradient.ndim > 1:
            flat = square.flatten(1)
            row = _averaged(state, "row", flat.mean(1), kept)
            column = _averaged(state, "column", flat.mean(0), kept)
            second = torch.outer(row, column).div_(row.mean().clamp_min(SMALLEST))
            second = second.view_as(gradient)
        else:
            second = _averaged(state, "square", square, kept).clone()
        change = gradient * second.clamp_min_(SMALLEST).rsqrt_()
        change.div_(_root_mean_square(change).clamp_min(1.0))
        scale = _root_mean_square(parameter).clamp_min(SMALLEST_SCALE)
        parameter.sub_(change.mul_(scale * rate))


def _averaged(state: dict[str, Any], name: str, value: torch.Tensor, kept: float) -> torch.Tensor:
    """Return a running mean, from its first value on, kept in fp32."""
    mean: torch.Tensor = state.setdefault(name, torch.zeros_like(value, dtype=torch.float32))
    return mean.mul_(kept).add_(value, alpha=1.0 - kept)


def _root_mean_square(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.square().mean().sqrt()
