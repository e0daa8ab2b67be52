"""Several sources whose weights move: more is drawn of what is furthest behind its reference.

Every so many steps the lead judges the weights as they are on text that no step learns from, and
tells the others; what follows from it is part of the training's state, so that any number of
ranks, and a run that goes on later, draw the same rows. Pruning moves its weights alike.
Source: Xia et al. 2023 (Sheared LLaMA), arXiv:2310.06694, section 2.2, algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from runners.jobs.domains import followed
from runners.jobs.runtime import BadInputError
from runners.jobs.train.checkpoint import TrainState
from runners.jobs.train.sources import Data, Judged
from runners.jobs.train.streams import BLOCK_ROWS, DataBatches
from runners.jobspec import MixedData, TrainSpec
from runners.jobspec.data import weights_of

LEAST_WEIGHT = 1 / BLOCK_ROWS  # from none at all no weight would ever come back


@dataclass
class Mixture:
    """The sources of one training in their order, what judges each, and what they follow."""

    batches: DataBatches
    judged: Sequence[Judged]
    data: MixedData
    rows_a_step: int

    def is_due(self, state: TrainState) -> bool:
        """Tell whether the weights move before the step that comes next."""
        moved = state.mixture[-1][0] if state.mixture else -1.0
        is_new = moved < state.step * self.rows_a_step
        return is_new and state.step % self.data.update_every_steps == 0

    def losses(self, model: PreTrainedModel) -> list[float]:
        """Return a model's mean loss a label on each source, in nats."""
        return [each.loss(model) for each in self.judged]

    def move(self, state: TrainState, losses: Sequence[float]) -> dict[str, float]:
        """Draw by new weights from the next step on; return the figures of each source."""
        if not state.mixture:
            given = (part.reference_loss for part in self.data.parts)
            told = zip(given, losses, strict=True)
            state.mixture_reference = tuple(found if own is None else own for own, found in told)
        before = state.mixture[-1][1:] if state.mixture else weights_of(self.data)
        behind = np.subtract(losses, state.mixture_reference).tolist()
        grown = [max(LEAST_WEIGHT, each) for each in followed(before, behind)]
        weights = [each / sum(grown) for each in grown]
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
        """Draw as the state's history has it."""
        self.batches.follow(state.mixture)

    def note(self, state: TrainState) -> str:
        """Return in words how often the weights moved, and to what."""
        last = state.mixture[-1][1:] if state.mixture else weights_of(self.data)
        shares = " : ".join(f"{each:.1%}" for each in last)
        return (
            f"moved every {self.data.update_every_steps} steps, {len(state.mixture)} times, to "
            f"{shares}, by each source's held-out loss above its reference"
        )


def mixture_of(data: Data, spec: TrainSpec) -> Mixture | None:
    """Return what moves the weights of a training's sources; None where they are fixed.

    Raises:
        BadInputError: of some source nothing was kept back to judge it by.
    """
    mixed, batches = spec.data, data.batches
    if not isinstance(mixed, MixedData) or mixed.weights == "fixed":
        return None
    if not isinstance(batches, DataBatches):
        raise TypeError(f"rows of several sources come from DataBatches, not {type(batches)}")
    for name, judged in data.by_source:
        if not len(judged.rows[0]):
            msg = (
                f"{name}: none of the samples that were kept back has an answer within "
                f"sequence_length, which is {spec.sequence_length}, and dynamic weights follow "
                "the loss on them; raise it, or choose weights fixed"
            )
            raise BadInputError(msg)
    rows_a_step = spec.micro_batch_size * spec.gradient_accumulation_steps
    return Mixture(batches, [judged for _, judged in data.by_source], mixed, rows_a_step)
