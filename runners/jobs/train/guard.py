"""Checks that skip or end a training step with a loss spike or non-finite gradients.

A spike is a loss above that of a uniform prediction and well above the median of recent losses.
Both occur at once with a too high learning rate, and rarely with a hard batch.
"""

import math
import statistics
from collections import deque

from runners.jobs.restarts import EndsAgainError

REMEMBERED = 32  # losses
MAX_SKIPPED = 8  # in a row: more are no accident of one batch


class DivergedError(EndsAgainError):
    """Training has diverged; the last checkpoint remains."""


class SpikeGuard:
    """Checks the loss and gradient norm of each step before the weights change."""

    def __init__(
        self, vocab_size: int, ratio: float, learning_rate: float, *, skips: bool
    ) -> None:
        """Treat losses from ``ratio`` times the median on as spikes; skip such steps, or raise."""
        self._uniform_loss = math.log(vocab_size)
        self._ratio = ratio
        self._rate = learning_rate
        self.skips = skips
        self._recent: deque[float] = deque(maxlen=REMEMBERED)
        self._skipped_in_a_row = 0
        self.num_skipped = 0

    @property
    def limit(self) -> float:
        """Return the highest accepted loss, in nats."""
        typical = statistics.median(self._recent) if self._recent else self._uniform_loss
        return max(self._uniform_loss, self._ratio * typical)

    def allows(self, step: int, loss: float, norm: float) -> bool:
        """Return whether the step may change the weights.

        Raises:
            DivergedError: it may not, and skipping is off or too many steps were skipped in a
                row.
        """
        fault = self._fault(loss, norm)
        if not fault:
            self._recent.append(loss)
            self._skipped_in_a_row = 0
            return True
        self.num_skipped += 1
        self._skipped_in_a_row += 1
        if self.skips and self._skipped_in_a_row <= MAX_SKIPPED:
            return False
        often = f", after {MAX_SKIPPED} steps that were skipped" if self.skips else ""
        msg = (
            f"{fault} at step {step}{often}; the checkpoint before it is kept. Start again with a "
            f"learning rate below {self._rate:g}"
        )
        raise DivergedError(msg)

    def _fault(self, loss: float, norm: float) -> str:
        if not math.isfinite(loss):
            return f"the loss became {loss}"
        if not math.isfinite(norm):
            return f"the norm of the gradients became {norm}"
        limit = self.limit
        return f"the loss leapt to {loss:.3g}, above {limit:.3g}," if loss > limit else ""
