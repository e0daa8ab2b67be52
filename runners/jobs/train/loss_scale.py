"""Dynamic loss scaling for fp16 gradients.

The scale grows while gradients are finite and is halved on overflow; that step is skipped.

Source: Micikevicius et al. 2017, arXiv:1710.03740, section 3.2.
"""

from collections.abc import Iterable

import torch

from runners.jobs.ranks import ALONE, Ranks

FIRST_SCALE = 2.0**16
GROWTH_STEPS = 200  # without overflow, until the scale is doubled
SMALLEST_SCALE = 1.0


class LossScale:
    """The loss scale of one training."""

    def __init__(self) -> None:
        """Start high: the first steps halve the scale until it fits."""
        self.value = FIRST_SCALE
        self.num_overflows = 0
        self.good_steps = 0  # in a row, since the scale last changed

    def unscale(self, parameters: Iterable[torch.nn.Parameter], ranks: Ranks = ALONE) -> bool:
        """Divide the gradients by the scale; return whether those of all ranks are finite.

        Raises:
            RankFailedError: not every rank responded in time.
        """
        gradients = [each.grad for each in parameters if each.grad is not None]
        largest = [each.abs().max().float() for each in gradients]
        overflows = bool(largest) and not bool(torch.stack(largest).isfinite().all())
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
