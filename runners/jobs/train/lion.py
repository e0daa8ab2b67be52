"""Lion: sign updates whose only state is one momentum.

Source: Chen et al. 2023, arXiv:2302.06675, algorithm 2.
"""

from collections.abc import Iterable
from typing import Any

import torch

from runners.jobs.train.one_by_one import OneByOne


class Lion(OneByOne):
    """Every weight moves by the learning rate, in the sign of the interpolated momentum."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], learning_rate: float, betas: tuple[float, float]
    ) -> None:
        """Create the groups; momenta are created in the first step."""
        super().__init__(groups, {"lr": learning_rate, "betas": betas, "weight_decay": 0.0})

    def move(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Update a weight by the sign of the interpolated momentum."""
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        momentum = state.setdefault("exp_avg", torch.zeros_like(parameter))
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        direction = momentum.lerp(gradient, 1.0 - beta1).sign_()
        parameter.add_(direction, alpha=-group["lr"])
        momentum.lerp_(gradient, 1.0 - beta2)
