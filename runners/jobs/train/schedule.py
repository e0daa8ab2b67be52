"""Progress of a run and its learning rate schedule; the first limit reached ends it."""

from dataclasses import dataclass

from runners.jobs.train.checkpoint import TrainState

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


@dataclass
class Pace:
    """The progress of a run, by the limit that is reached first."""

    max_steps: int | None
    budget_seconds: float | None

    def fraction(self, state: TrainState) -> float:
        """Return the share of the run that is done, 1 at its end."""
        by_steps = state.step / self.max_steps if self.max_steps else 0.0
        by_time = state.elapsed_seconds / self.budget_seconds if self.budget_seconds else 0.0
        return min(1.0, max(by_steps, by_time))

    def eta_seconds(self, state: TrainState) -> float | None:
        """Return the estimated seconds left; before the first step the budget, or None."""
        fraction = self.fraction(state)
        if fraction <= 0.0:
            return self.budget_seconds
        return state.elapsed_seconds * (1.0 - fraction) / fraction

    def progress(self, state: TrainState) -> tuple[float, float, str]:
        """Return done, total and unit of the limit in effect."""
        if self.budget_seconds is None:
            return float(state.step), float(self.max_steps or 0), "steps"
        return self.fraction(state) * self.budget_seconds, self.budget_seconds, "seconds"
