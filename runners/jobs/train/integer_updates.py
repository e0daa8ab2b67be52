"""Lion over integers: weights, gradients and momentum in 8 bits, each updated as it comes (QFT).

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

STEPS_APART = 2**32  # between the seeds of one weight and of the next
NUM_USES = 3  # of chance in one step of one weight
OF_AN_UPDATE, OF_A_GRADIENT, OF_A_SUM = range(NUM_USES)


class Qft(FusedUpdate):
    """Every weight moves by the learning rate, in the direction of a momentum of integers.

    Chance in rounding follows from the weight and its count of steps: a resumed run is the same.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        learning_rate: float,
        betas: tuple[float, float],
        matrices: Iterable[IntegerMatrix],
    ) -> None:
        """Learn from the matrices' gradients, whose codes are among the groups' parameters."""
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
        """Keep one layer's gradient as integers; learn from it once all layers gave theirs."""
        codes = matrix.codes
        with torch.no_grad():
            before = self._waiting.pop(codes, None)
            given = self._integers(codes, gradient, OF_A_GRADIENT)
            del gradient
            if before is not None:
                summed = before.values().add_(given.values())
                given = self._integers(codes, summed, OF_A_SUM)
            waiting = sum(each.nbytes for each in self._waiting.values())
            self._note_held(given.nbytes + waiting)
            if matrix.is_whole():
                self._learn(codes, given, group)
            else:
                self._waiting[codes] = given

    def take(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Learn from the gradient of a vector, which autograd kept."""
        self._learn(parameter, self._integers(parameter, gradient, OF_A_GRADIENT), group)

    def _learn(self, parameter: torch.Tensor, given: Integers, group: dict[str, Any]) -> None:
        norm = given.norm()
        self._squares += norm * norm
        if not math.isfinite(norm):
            return
        state, (rows, columns) = self.state[parameter], given.codes.shape
        step = state["step"] = state.get("step", 0) + 1
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(given.codes)
            state["exp_avg_scale"] = torch.zeros_like(given.scale)
        momentum = Integers(state["exp_avg"], state["exp_avg_scale"])
        chance = self._chance(parameter, step, OF_AN_UPDATE)
        matrix = self._matrices.get(parameter)
        kept, (towards, remembered) = 1.0 - group["lr"] * group["weight_decay"], self._betas
        for part in row_parts(given.codes):
            gradient, before = given.rows(part).values(), momentum.rows(part)
            moving = before.values()
            change = moving.lerp(gradient, 1.0 - towards).sign_().mul_(-group["lr"])
            if matrix is None:
                here = parameter.view(rows, columns)[part]
                here.mul_(kept).add_(change)
            else:
                stored = matrix.integers.rows(part)
                _write(stored, rounded(stored.values().mul_(kept).add_(change), chance))
            _write(before, rounded(moving.lerp_(gradient, 1.0 - remembered), chance))

    def _integers(self, parameter: torch.Tensor, values: torch.Tensor, use: int) -> Integers:
        step = self.state[parameter].get("step", 0) if parameter in self.state else 0
        matrix = values if values.ndim > 1 else values.unsqueeze(0)
        return rounded_by_parts(matrix.flatten(1), self._chance(parameter, step, use))

    def _chance(self, parameter: torch.Tensor, step: int, use: int) -> torch.Generator:
        """Return what rounds one weight's numbers in one step."""
        seed = (self._places[parameter] * STEPS_APART + step) * NUM_USES + use
        return torch.Generator(parameter.device).manual_seed(seed)


def _write(stored: Integers, new: Integers) -> None:
    stored.codes.copy_(new.codes)
    stored.scale.copy_(new.scale)
