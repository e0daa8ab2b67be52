"""Base class of optimizers that update one weight after the other."""

from collections.abc import Callable
from typing import Any

import torch


class OneByOne(torch.optim.Optimizer):
    """Updates every weight that has a gradient, one at a time."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch's own has overloads
        """Update all weights, and return the closure's result."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, group)
        return loss

    def move(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Update a weight with its gradient and its group's settings."""
        raise NotImplementedError
