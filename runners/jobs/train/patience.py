"""When a training ends early: validations that bring no better loss."""

from dataclasses import dataclass

from runners.jobs.train.checkpoint import TrainState


@dataclass
class Patience:
    """Counts validations without a gain in the training's own state, which checkpoints keep."""

    most: int | None  # validations in a row without a better loss; None waits for ever

    def take(self, state: TrainState, loss: float) -> None:
        """Note the loss of a validation, in nats."""
        if not state.best_validation_loss or loss < state.best_validation_loss:
            state.best_validation_loss, state.validations_without_gain = loss, 0
        else:
            state.validations_without_gain += 1

    def is_over(self, state: TrainState) -> bool:
        """Return whether there were as many as are waited for."""
        return self.most is not None and state.validations_without_gain >= self.most

    def note(self, state: TrainState) -> str:
        """Return in words why the training ended where it did."""
        return (
            f"ended after step {state.step}: {state.validations_without_gain} validations in a "
            f"row brought no loss below {state.best_validation_loss:.4f} nats"
        )
