"""QFT: Lion with 8-bit integer weights, gradients and momentum, updated in the backward pass.

Source: Li et al. 2023 (QFT), arXiv:2310.07147, section 3; Chen et al. 2023 (Lion),
arXiv:2302.06675, algorithm 2; Lv et al. 2023 (LOMO), arXiv:2306.09782 (the fused update).
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from runners.jobs.train.fused_updates import FusedUpdate
from runners.jobs.train.integers import (
    IntegerMatrix,
    Integers,
    rounded,
    rounded_by_parts,
    row_parts,
)

STEPS_APART = 2**32  # between the seeds of two weights
NUM_USES = 3  # random seeds per step and weight
OF_AN_UPDATE, OF_A_GRADIENT, OF_A_SUM = range(NUM_USES)


class Qft(FusedUpdate):
    """Sign updates at the learning rate, with an integer momentum.

    Stochastic rounding is seeded by weight and step, so a resumed run is identical.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        learning_rate: float,
        betas: tuple[float, float],
        matrices: Iterable[IntegerMatrix],
    ) -> None:
        """Register on the matrices' gradients; their codes are in the groups."""
        self._matrices: Mapping[torch.Tensor, IntegerMatrix] = {
            each.codes: each for each in matrices
        }
        self._betas = betas
        self._waiting: dict[torch.Tensor, Integers] = {}
        super().__init__(groups, learning_rate)
        self._places = {each: index for index, each in enumerate(self._trained)}

    def _hook(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        matrix = self._matrices.get(parameter)
        if matrix is None:
            super()._hook(parameter, group)
            return
        matrix.learn = lambda gradient: self._arrived(matrix, gradient, group)

    def _arrived(
        self, matrix: IntegerMatrix, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        """Store a layer's gradient as integers; update when all uses of the matrix have one."""
        codes = matrix.codes
        with torch.no_grad():
            partial = self._waiting.pop(codes, None)
            integers = self._integers(codes, gradient, OF_A_GRADIENT)
            del gradient
            if partial is not None:
                summed = partial.values().add_(integers.values())
                integers = self._integers(codes, summed, OF_A_SUM)
            waiting_bytes = sum(each.nbytes for each in self._waiting.values())
            self._note_held(integers.nbytes + waiting_bytes)
            if matrix.is_whole():
                self._update(codes, integers, group)
            else:
                self._waiting[codes] = integers

    def take(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Update a vector with the gradient that autograd computed."""
        self._update(parameter, self._integers(parameter, gradient, OF_A_GRADIENT), group)

    def _update(self, parameter: torch.Tensor, gradients: Integers, group: dict[str, Any]) -> None:
        norm = gradients.norm()
        self._squares += norm * norm
        if not math.isfinite(norm):
            return
        state, (rows, columns) = self.state[parameter], gradients.codes.shape
        step = state["step"] = state.get("step", 0) + 1
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(gradients.codes)
            state["exp_avg_scale"] = torch.zeros_like(gradients.scale)
        momentum = Integers(state["exp_avg"], state["exp_avg_scale"])
        chance = self._generator(parameter, step, OF_AN_UPDATE)
        matrix = self._matrices.get(parameter)
        decay, (towards, remembered) = 1.0 - group["lr"] * group["weight_decay"], self._betas
        for part in row_parts(gradients.codes):
            gradient, old_momentum = gradients.rows(part).values(), momentum.rows(part)
            momentum_values = old_momentum.values()
            change = momentum_values.lerp(gradient, 1.0 - towards).sign_().mul_(-group["lr"])
            if matrix is None:
                block = parameter.view(rows, columns)[part]
                block.mul_(decay).add_(change)
            else:
                stored = matrix.integers.rows(part)
                _write(stored, rounded(stored.values().mul_(decay).add_(change), chance))
            _write(
                old_momentum, rounded(momentum_values.lerp_(gradient, 1.0 - remembered), chance)
            )

    def _integers(self, parameter: torch.Tensor, values: torch.Tensor, use: int) -> Integers:
        step = self.state[parameter].get("step", 0) if parameter in self.state else 0
        matrix = values if values.ndim > 1 else values.unsqueeze(0)
        return rounded_by_parts(matrix.flatten(1), self._generator(parameter, step, use))

    def _generator(self, parameter: torch.Tensor, step: int, use: int) -> torch.Generator:
        """Return the random generator of one rounding of one weight in one step."""
        seed = (self._places[parameter] * STEPS_APART + step) * NUM_USES + use
        return torch.Generator(parameter.device).manual_seed(seed)


def _write(stored: Integers, new: Integers) -> None:
    stored.codes.copy_(new.codes)
    stored.scale.copy_(new.scale)
