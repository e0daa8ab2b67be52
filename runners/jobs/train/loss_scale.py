"""A loss that is scaled up before the backward pass, so that 16-bit gradients keep small numbers.

The scale grows while gradients stay finite and is halved when they do not; that step is skipped.

Source: Micikevicius et al. 2017, arXiv:1710.03740, section 3.2.
"""

import math
from collections.abc import Iterable

import torch

from runners.jobs.ranks import ALONE, Ranks

FIRST_SCALE = 2.0**16
GROWTH_STEPS = 200  # without an overflow, until the scale is doubled
SMALLEST_SCALE = 1.0


class LossScale:
    """The scale of one training's losses."""

    def __init__(self) -> None:
        """Begin high: the first steps find the scale by halving it."""
        self.value = FIRST_SCALE
        self.num_overflows = 0
        self.good_steps = 0  # in a row, since the scale changed

    def unscale(self, parameters: Iterable[torch.nn.Parameter], ranks: Ranks = ALONE) -> bool:
        """Take the scale off the gradients; return whether those of all ranks are finite.

        Raises:
            RankLostError: not every rank said so in time.
        """
        gradients = [each.grad for each in parameters if each.grad is not None]
        overflows = not all(math.isfinite(float(each.abs().max())) for each in gradients)
        is_finite = not any(ranks.total([float(overflows)]))
        for each in gradients:
            each.div_(self.value)
        self._adapt(is_finite=is_finite)
        return is_finite

    def _adapt(self, *, is_finite: bool) -> None:
        if not is_finite:
            self.num_overflows += 1
            self.good_steps = 0
            self.value = max(SMALLEST_SCALE, self.value / 2.0)
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.good_steps = 0
            self.value *= 2.0
