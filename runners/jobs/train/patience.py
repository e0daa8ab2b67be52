"""Early stopping after validations without a better loss."""

from dataclasses import dataclass

from runners.jobs.train.checkpoint import TrainState


@dataclass
class Patience:
    """Counts validations without a gain, in the training state that checkpoints store."""

    most: int | None  # consecutive validations without a better loss; None: no early stop

    def take(self, state: TrainState, loss: float) -> None:
        """Record the loss of a validation, in nats."""
        if not state.best_validation_loss or loss < state.best_validation_loss:
            state.best_validation_loss, state.validations_without_gain = loss, 0
        else:
            state.validations_without_gain += 1

    def is_over(self, state: TrainState) -> bool:
        """Return whether the limit has been reached."""
        return self.most is not None and state.validations_without_gain >= self.most

    def note(self, state: TrainState) -> str:
        """Return a note on why the training ended early."""
        return (
            f"ended after step {state.step}: {state.validations_without_gain} validations in a "
            f"row brought no loss below {state.best_validation_loss:.4f} nats"
        )
