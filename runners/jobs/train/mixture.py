"""Dynamic mixture weights: sources further above their reference loss are drawn more often.

Every few steps the lead evaluates the current weights on held-out text and broadcasts the losses.
The resulting mixture is part of the training state, so that any number of ranks, and a resumed
run, draw the same rows. Sheared LLaMA's pruning uses the same update.
Source: Xia et al. 2023 (Sheared LLaMA), arXiv:2310.06694, section 2.2, algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from runners.jobs.domains import followed
from runners.jobs.runtime import BadInputError
from runners.jobs.train.checkpoint import TrainState
from runners.jobs.train.rows import BLOCK_ROWS, DataBatches
from runners.jobs.train.sources import Data, HeldOutRows
from runners.jobspec import MixedData, TrainSpec
from runners.jobspec.data import weights_of

LEAST_WEIGHT = 1 / BLOCK_ROWS  # a weight of zero could never grow again


@dataclass
class Mixture:
    """The sources of one training, their held-out rows, and the mixture settings."""

    batches: DataBatches
    judged: Sequence[HeldOutRows]
    data: MixedData
    rows_a_step: int

    def is_due(self, state: TrainState) -> bool:
        """Return whether the weights change before the next step."""
        last_row = state.mixture[-1][0] if state.mixture else -1.0
        is_new = last_row < state.step * self.rows_a_step
        return is_new and state.step % self.data.update_every_steps == 0

    def losses(self, model: PreTrainedModel) -> list[float]:
        """Return a model's mean loss per label on each source, in nats."""
        return [each.loss(model) for each in self.judged]

    def move(self, state: TrainState, losses: Sequence[float]) -> dict[str, float]:
        """Set new weights from the next step on; return the figures of each source."""
        if not state.mixture:
            references = (part.reference_loss for part in self.data.parts)
            pairs = zip(references, losses, strict=True)
            state.mixture_reference = tuple(
                loss if reference is None else reference for reference, loss in pairs
            )
        old_weights = state.mixture[-1][1:] if state.mixture else weights_of(self.data)
        excess = np.subtract(losses, state.mixture_reference).tolist()
        raw_weights = [max(LEAST_WEIGHT, each) for each in followed(old_weights, excess)]
        weights = [each / sum(raw_weights) for each in raw_weights]
        first = state.step * self.rows_a_step
        state.mixture += ((float(first), *weights),)
        self.batches.move(first, weights)
        figures = {"weight": weights, "loss": losses, "reference": state.mixture_reference}
        return {
            f"source{at}_{name}": value
            for name, values in figures.items()
            for at, value in enumerate(values, start=1)
        }

    def go_on(self, state: TrainState) -> None:
        """Restore the mixture from the state's history."""
        self.batches.follow(state.mixture)

    def note(self, state: TrainState) -> str:
        """Return a note on how often the weights changed, and their last values."""
        last = state.mixture[-1][1:] if state.mixture else weights_of(self.data)
        shares = " : ".join(f"{each:.1%}" for each in last)
        return (
            f"moved every {self.data.update_every_steps} steps, {len(state.mixture)} times, to "
            f"{shares}, by each source's held-out loss above its reference"
        )


def mixture_of(data: Data, spec: TrainSpec) -> Mixture | None:
    """Return the dynamic mixture of a training; None if the weights are fixed.

    Raises:
        BadInputError: a source has no held-out rows.
    """
    mixed, batches = spec.data, data.batches
    if not isinstance(mixed, MixedData) or mixed.weights == "fixed":
        return None
    if not isinstance(batches, DataBatches):
        raise TypeError(f"rows of several sources come from DataBatches, not {type(batches)}")
    for name, held_out in data.by_source:
        if not len(held_out.rows[0]):
            msg = (
                f"{name}: none of the samples that were kept back has an answer within "
                f"sequence_length, which is {spec.sequence_length}, and dynamic weights follow "
                "the loss on them; raise it, or choose weights fixed"
            )
            raise BadInputError(msg)
    rows_a_step = spec.micro_batch_size * spec.gradient_accumulation_steps
    return Mixture(batches, [held_out for _, held_out in data.by_source], mixed, rows_a_step)
