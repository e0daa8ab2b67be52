"""Which tokens a step learns from, by the step's number alone.

A resumed run then sees what an unbroken one would, however many ranks share a step.
"""

from typing import NamedTuple, Protocol

import numpy as np
import torch

from runners.jobs.tokenizer import TokenIds
from runners.jobspec import TrainSpec

IGNORED = -100  # a label that no loss is taken of, as torch's cross entropy has it


class Batch(NamedTuple):
    """One micro-batch: ``input_ids`` and what should follow each, ``labels`` [rows, length].

    ``position_ids`` [rows, length] begin at 0 with each document where several share a row: the
    model then lets none see another. None: a row is one text.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        positions = None if self.position_ids is None else self.position_ids.to(device)
        return Batch(self.input_ids.to(device), self.labels.to(device), positions)

    @property
    def num_labels(self) -> int:
        """Return of how many tokens a loss is taken."""
        return int((self.labels != IGNORED).sum())


class Batches(Protocol):
    """Where a training's micro-batches come from."""

    def micro_batch(self, step: int, micro_step: int) -> Batch:
        """Return the same micro-batch whenever, and on whichever rank, it is asked for."""

    def num_tokens(self, step: int, micro_step: int) -> int:
        """Return how many of a micro-batch's positions are no padding."""


class TextBatches:
    """Pieces of one long text, drawn anew for each step."""

    def __init__(self, ids: TokenIds, spec: TrainSpec) -> None:
        """Draw from ``ids`` as the spec has it: seed, rows and length."""
        self._ids = ids
        self._spec = spec
        self._length = min(spec.sequence_length, len(ids) - 1)

    def num_tokens(self, step: int, micro_step: int) -> int:  # noqa: ARG002 - each is alike
        """Return how many tokens a micro-batch has."""
        return self._spec.micro_batch_size * self._length

    def micro_batch(self, step: int, micro_step: int) -> Batch:
        """Return one micro-batch of [micro_batch_size, sequence_length]."""
        spec = self._spec
        generator = np.random.default_rng((spec.seed, step, micro_step))
        length = self._length
        starts = generator.integers(0, len(self._ids) - length, size=spec.micro_batch_size)
        rows = np.stack([self._ids[at : at + length + 1] for at in starts]).astype(np.int64)
        drawn = torch.from_numpy(rows)
        return Batch(drawn[:, :-1], drawn[:, 1:])
