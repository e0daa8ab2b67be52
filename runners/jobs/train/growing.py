"""GrowLength: short sequences first, then longer ones, with the same tokens per step.

Source: Jin et al. 2023 (GrowLength), arXiv:2310.00576, section 3.
"""

from collections.abc import Callable

from runners.jobs.train.batches import Batch, Batches
from runners.jobspec import TrainSpec


class GrowingBatches:
    """Micro-batches whose length depends on the step number."""

    def __init__(self, stages: list[tuple[int, Batches]]) -> None:
        """Use each stage's batches until its step; the last stage has no end."""
        self._stages = stages

    def micro_batch(self, step: int, micro_step: int) -> Batch:
        """Return the micro-batch of the step's stage."""
        return self._stage_of(step).micro_batch(step, micro_step)

    def num_tokens(self, step: int, micro_step: int) -> int:
        """Return the number of tokens of a micro-batch; it is the same in each stage."""
        return self._stage_of(step).num_tokens(step, micro_step)

    def _stage_of(self, step: int) -> Batches:
        return next((each for until, each in self._stages if step < until), self._stages[-1][1])


def with_growing_lengths(spec: TrainSpec, make: Callable[[TrainSpec], Batches]) -> Batches:
    """Return ``make(spec)``, or one batch source per stage if the spec has a length schedule."""
    if not spec.length_schedule or spec.max_steps is None:
        return make(spec)
    stages, share_done = [], 0.0
    tokens = spec.micro_batch_size * spec.sequence_length
    for length, share in spec.length_schedule:
        share_done += share
        fields = {"sequence_length": length, "micro_batch_size": tokens // length}
        stages.append((round(share_done * spec.max_steps), make(spec.model_copy(update=fields))))
    return GrowingBatches(stages)
