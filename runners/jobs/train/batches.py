"""Which tokens a step learns from, by the step's number alone.

A resumed run then sees what an unbroken one would, however many ranks share a step.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from runners.jobs.tokenizer import TokenIds
from runners.jobspec import TrainSpec

IGNORED = -100  # a label that no loss is taken of, as torch's cross entropy has it


class Batch(NamedTuple):
    """One micro-batch: ``input_ids`` and what should follow each, ``labels`` [rows, length].

    ``position_ids`` [rows, length] begin at 0 with each document where several share a row: the
    model then lets none see another. None: a row is one text. With an ``attention_mask`` [rows,
    length], 0 where a row is padding, ``labels`` [rows] are the classes of whole rows.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        beside = (self.position_ids, self.attention_mask)
        moved = (None if each is None else each.to(device) for each in beside)
        return Batch(self.input_ids.to(device), self.labels.to(device), *moved)

    @property
    def inputs(self) -> dict[str, Any]:
        """Return what a model is called with: a decoder, or with a mask an encoder."""
        if self.attention_mask is not None:
            return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        places = {"position_ids": self.position_ids, "use_cache": False}
        return {"input_ids": self.input_ids, **places}

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
