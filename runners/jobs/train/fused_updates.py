"""Optimizers that update a weight as soon as its gradient is computed, and free the gradient.

Only the gradients of one operator are in memory at a time. What needs all gradients at once is not
possible: norms are clipped per tensor, and a step has one micro-batch. A tied weight's gradient is
complete before it is used: autograd sums the gradients of its uses.

Source: Lv et al. 2023 (LOMO), arXiv:2306.09782; Lv et al. 2023 (AdaLomo), arXiv:2310.10195,
algorithm 1.
"""

# mypy: disable-error-code="no-untyped-call"
# torch leaves its hooks untyped.

from collections.abc import Callable, Iterable
from typing import Any

import torch

from runners.jobs.memory import tensor_bytes

MAX_TENSOR_NORM = 1.0
SECOND_MOMENT_DECAY = 0.99  # AdaLomo's beta
SMALLEST = 1e-12
SMALLEST_SCALE = 1e-3  # of a weight's root mean square, so that zero weights can move


class FusedUpdate(torch.optim.Optimizer):
    """An optimizer that runs in hooks of the backward pass; ``step`` does nothing.

    The groups' learning rate is read when a gradient arrives: set it before the backward pass.
    ``peak_gradient_bytes`` is the peak of the gradients in memory since it was last set to 0.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], learning_rate: float) -> None:
        """Register a hook on every weight."""
        super().__init__(groups, {"lr": learning_rate, "weight_decay": 0.0})
        self.peak_gradient_bytes = 0
        self._squares: torch.Tensor | float = 0.0
        self._trained = [each for group in self.param_groups for each in group["params"]]
        for group in self.param_groups:
            for parameter in group["params"]:
                self._hook(parameter, group)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch has overloads
        """Do nothing: the backward pass has updated every weight."""
        return closure() if closure is not None else None

    def norm(self) -> torch.Tensor:
        """Return the norm of the gradients since the last call, unread."""
        squares, self._squares = self._squares, 0.0
        return torch.as_tensor(squares, dtype=torch.float64).sqrt()

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
        """Update a weight with its gradient."""
        raise NotImplementedError

    def take(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Clip a gradient, apply weight decay and update the weight."""
        norm = gradient.norm().double()  # not read: every weight would wait for the device
        self._squares = norm.square() + self._squares
        gradient.mul_((MAX_TENSOR_NORM / (norm + SMALLEST)).clamp(max=1.0))
        # A gradient without a norm moves nothing; the loss is not finite either, and the run ends.
        gradient.masked_fill_(~norm.isfinite(), 0.0)
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

        hooked: Any = parameter  # the hook's method is untyped
        hooked.register_post_accumulate_grad_hook(arrived)

    def _note_held(self, extra_bytes: int) -> None:
        """Update the gradient peak; ``extra_bytes`` come on top of ``.grad``."""
        gradient_bytes = sum(
            tensor_bytes(each.grad) for each in self._trained if each.grad is not None
        )
        self.peak_gradient_bytes = max(self.peak_gradient_bytes, gradient_bytes + extra_bytes)


class Lomo(FusedUpdate):
    """SGD with a fused update; it has no state."""

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
        """Take a gradient step."""
        parameter.add_(gradient, alpha=-rate)


class AdaLomo(FusedUpdate):
    """A fused optimizer with factored second moments: one row and one column per matrix.

    The update's root mean square is clipped to 1 and scaled by that of the weight.
    """

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
        """Take a gradient step with an adaptive rate per weight."""
        state, square = self.state[parameter], gradient.square()
        step = state["step"] = state.get("step", 0) + 1
        decay = SECOND_MOMENT_DECAY if step > 1 else 0.0
        if gradient.ndim > 1:
            flat = square.flatten(1)
            row = _averaged(state, "row", flat.mean(1), decay)
            column = _averaged(state, "column", flat.mean(0), decay)
            second = torch.outer(row, column).div_(row.mean().clamp_min(SMALLEST))
            second = second.view_as(gradient)
        else:
            second = _averaged(state, "square", square, decay).clone()
        change = gradient * second.clamp_min_(SMALLEST).rsqrt_()
        change.div_(_root_mean_square(change).clamp_min(1.0))
        scale = _root_mean_square(parameter).clamp_min(SMALLEST_SCALE)
        parameter.sub_(change.mul_(scale * rate))


def _averaged(state: dict[str, Any], name: str, value: torch.Tensor, decay: float) -> torch.Tensor:
    """Update and return a running mean in fp32."""
    mean: torch.Tensor = state.setdefault(name, torch.zeros_like(value, dtype=torch.float32))
    return mean.mul_(decay).add_(value, alpha=1.0 - decay)


def _root_mean_square(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.square().mean().sqrt()
