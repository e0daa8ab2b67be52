"""The micro-batches of a step, determined by the step number alone.

A resumed run therefore sees the same data as an uninterrupted one, on any number of ranks.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from runners.jobs.tokenizer import TokenIds
from runners.jobspec import TrainSpec

IGNORED = -100  # label without loss, as in torch's cross entropy


class Batch(NamedTuple):
    """One micro-batch: ``input_ids`` and the next tokens, ``labels``, both [rows, length].

    ``position_ids`` [rows, length] restart at 0 for each document if several share a row, and the
    model then masks attention between documents. None: a row is one text. With an
    ``attention_mask`` [rows, length], 0 for padding, ``labels`` [rows] are the classes of whole
    rows.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        optional = (self.position_ids, self.attention_mask)
        moved = (None if each is None else each.to(device) for each in optional)
        return Batch(self.input_ids.to(device), self.labels.to(device), *moved)

    @property
    def inputs(self) -> dict[str, Any]:
        """Return the model's keyword arguments: for a decoder, or with a mask for an encoder."""
        if self.attention_mask is not None:
            return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        places = {"position_ids": self.position_ids, "use_cache": False}
        return {"input_ids": self.input_ids, **places}

    @property
    def num_labels(self) -> int:
        """Return the number of tokens with a loss."""
        return int((self.labels != IGNORED).sum())


class Batches(Protocol):
    """The source of a training's micro-batches."""

    def micro_batch(self, step: int, micro_step: int) -> Batch:
        """Return a micro-batch; it is the same at any time and on any rank."""

    def num_tokens(self, step: int, micro_step: int) -> int:
        """Return the number of a micro-batch's positions without padding."""


class TextBatches:
    """Random windows of one long text, drawn for each step."""

    def __init__(self, ids: TokenIds, spec: TrainSpec) -> None:
        """Draw from ``ids`` with the spec's seed, rows and length."""
        self._ids = ids
        self._spec = spec
        self._length = min(spec.sequence_length, len(ids) - 1)

    def num_tokens(self, step: int, micro_step: int) -> int:  # noqa: ARG002 - each is alike
        """Return the number of tokens of a micro-batch."""
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
