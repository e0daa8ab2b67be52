"""Progress and learning rate of a run, loss scale, and a guard against a loss that diverges."""

# mypy: disable-error-code="no-untyped-call"
# torch ships types, but leaves some of its functions untyped.
import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from runners.jobs.ranks import ALONE, Ranks
from runners.jobs.runtime import EndsAgainError
from runners.jobs.train.checkpoint import TrainState
from runners.jobspec.compress import FIRST_STEPS_SKIPPED

# Progress of a run and its learning rate schedule; the first limit reached ends it.


WARMUP_FRACTION = 0.04
FINAL_LEARNING_RATE_RATIO = 0.02


def learning_rate_ratio(fraction: float) -> float:
    """Return the share of the peak learning rate at a fraction of the run.

    Linear warm-up, then linear decay to 2 %, over whichever limit ends the run.
    """
    if fraction < WARMUP_FRACTION:
        return max(fraction, 0.01 * WARMUP_FRACTION) / WARMUP_FRACTION
    left = (1.0 - min(fraction, 1.0)) / (1.0 - WARMUP_FRACTION)
    return FINAL_LEARNING_RATE_RATIO + (1.0 - FINAL_LEARNING_RATE_RATIO) * left


FEWEST_RECENT = 20  # steps
RECENT_SHARE = 0.25  # of all steps, the newest: a machine's load changes


def recent_mean(step_seconds: Sequence[float]) -> float:
    """Return the mean of the newest steps' seconds, without the first ones; 0 without any."""
    steady = step_seconds[FIRST_STEPS_SKIPPED:] or step_seconds
    recent = steady[-max(FEWEST_RECENT, int(RECENT_SHARE * len(steady))) :]
    return sum(recent) / len(recent) if recent else 0.0


@dataclass
class RunProgress:
    """The progress of a run, by the limit that is reached first."""

    max_steps: int | None
    budget_seconds: float | None

    def fraction(self, state: TrainState) -> float:
        """Return the share of the run that is done, 1 at its end."""
        by_steps = state.step / self.max_steps if self.max_steps else 0.0
        by_time = state.elapsed_seconds / self.budget_seconds if self.budget_seconds else 0.0
        return min(1.0, max(by_steps, by_time))

    def seconds_left(
        self, state: TrainState, step_seconds: Sequence[float] = (), between_seconds: float = 0.0
    ) -> float | None:
        """Return the estimated seconds until a limit is reached; None if nothing tells them.

        ``step_seconds`` are those of this process's steps so far, of which the newest set the
        pace; without them, it is that of the whole run. ``between_seconds`` is the time that
        evaluations take between the steps of a whole run.
        """
        left = []
        if self.budget_seconds is not None:
            left.append(max(0.0, self.budget_seconds - state.elapsed_seconds))
        if self.max_steps and (step_seconds or state.step):
            per_step = recent_mean(step_seconds) or state.elapsed_seconds / max(1, state.step)
            per_step += between_seconds / self.max_steps
            left.append(max(0, self.max_steps - state.step) * per_step)
        return min(left, default=None)

    def progress(self, state: TrainState) -> tuple[float, float, str]:
        """Return done, total and unit of the limit in effect."""
        if self.budget_seconds is None:
            return float(state.step), float(self.max_steps or 0), "steps"
        return self.fraction(state) * self.budget_seconds, self.budget_seconds, "seconds"


# Dynamic loss scaling for fp16 gradients.
#
# The scale grows while gradients are finite and is halved on overflow; that step is skipped.
#
# Source: Micikevicius et al. 2017, arXiv:1710.03740, section 3.2.


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


# A step's loss and gradient norm on their way from the device to the host.
#
# The copy runs beside the device's work: a step that is read after the next one was launched has
# not kept the device waiting.


class StepFigures(NamedTuple):
    """The figures of one step, on the host."""

    loss: float  # mean loss per token in nats, of all ranks
    own_loss: float  # of this rank's micro-batches
    grad_norm: float  # before clipping


class UnreadFigures:
    """The figures of one step, copied once; ``figures`` waits for the copy alone."""

    def __init__(self, step: int, *figures: torch.Tensor) -> None:
        """Start to copy the figures, in the order of ``StepFigures``."""
        self.step = step
        device = figures[0].device
        stacked = torch.stack([each.detach().to(device, torch.float64) for each in figures])
        self._host = stacked
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._host = torch.empty(stacked.shape, dtype=torch.float64, pin_memory=True)
            self._host.copy_(stacked, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    @property
    def figures(self) -> StepFigures:
        """Return the figures; waits until the device has computed them."""
        if self._copied is not None:
            self._copied.synchronize()
        return StepFigures(*self._host.tolist())


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

    @property
    def limit(self) -> float:
        """Return the highest accepted loss, in nats."""
        typical = statistics.median(self._recent) if self._recent else self._uniform_loss
        return max(self._uniform_loss, self._ratio * typical)

    def allows(self, step: int, loss: float, norm: float) -> bool:
        """Return whether the step may change the weights.

        Raises:
            DivergedError: the step is rejected, and skipping is off or too many steps were
                skipped in a row.
        """
        fault = self._fault(loss, norm)
        if not fault:
            self._recent.append(loss)
            self._skipped_in_a_row = 0
            return True
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
