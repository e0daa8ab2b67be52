"""What keeps a step from spoiling the weights: a loss that leaps, gradients that are no numbers.

A leap is a loss above what knowing nothing costs, and well above the recent losses' median: at a
learning rate that is too high both come at once, at a hard piece of text hardly ever.
"""

import math
import statistics
from collections import deque

from runners.jobs.restarts import EndsAgainError

REMEMBERED = 32  # losses
MAX_SKIPPED = 8  # in a row: more are no accident of one batch


class DivergedError(EndsAgainError):
    """Training no longer leads anywhere; the last checkpoint stands."""


class SpikeGuard:
    """Judges each step by its loss and its gradients' norm, before the weights change."""

    def __init__(
        self, vocab_size: int, ratio: float, learning_rate: float, *, skips: bool
    ) -> None:
        """Take a loss for a leap from ``ratio`` times the median on; skip such steps, or end."""
        self._nothing_known = math.log(vocab_size)
        self._ratio = ratio
        self._rate = learning_rate
        self._skips = skips
        self._recent: deque[float] = deque(maxlen=REMEMBERED)
        self._skipped_in_a_row = 0
        self.num_skipped = 0

    @property
    def limit(self) -> float:
        """Return the highest loss that is none too many, in nats."""
        usual = statistics.median(self._recent) if self._recent else self._nothing_known
        return max(self._nothing_known, self._ratio * usual)

    def allows(self, step: int, loss: float, norm: float) -> bool:
        """Return whether the step is to change the weights.

        Raises:
            DivergedError: it is not, and such steps are not skipped, or were too many in a row.
        """
        fault = self._fault(loss, norm)
        if not fault:
            self._recent.append(loss)
            self._skipped_in_a_row = 0
            return True
        self.num_skipped += 1
        self._skipped_in_a_row += 1
        if self._skips and self._skipped_in_a_row <= MAX_SKIPPED:
            return False
        often = f", after {MAX_SKIPPED} steps that were skipped" if self._skips else ""
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
