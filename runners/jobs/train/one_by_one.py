"""Optimisers that take one weight after the other."""

from collections.abc import Callable
from typing import Any

import torch


class OneByOne(torch.optim.Optimizer):
    """Moves every weight that has a gradient, alone."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch's own has overloads
        """Move the weights, and return what the closure does."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, group)
        return loss

    def move(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Change a weight by its gradient, as its group says."""
        raise NotImplementedError
