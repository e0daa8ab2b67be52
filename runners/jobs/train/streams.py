"""The rows of each step: every source is shuffled once per epoch.

With several sources, each block of rows contains each source's exact quota. Any rank and any
resumed run finds its rows from the step number, and with moving weights from their history.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from runners.jobs.runtime import BadInputError
from runners.jobs.train.batches import IGNORED, Batch
from runners.jobs.train.rows import Numbers
from runners.jobspec import TrainSpec

BLOCK_ROWS = 1024  # with several sources: the rows over which quotas hold exactly
PADDED_LENGTHS = 8  # distinct padded lengths at most: kernels are built and cached for each
COUNTED_BATCHES = 1024  # from a run's start, to estimate padding and label shares


Block = tuple[tuple[int, int], Numbers]  # (era's first row, block index), source of each row
NO_BLOCK: Block = ((0, -1), np.zeros(0, dtype=np.int64))


class Rows(Protocol):
    """The rows of one source, and the number of inputs of each."""

    lengths: Numbers

    def __len__(self) -> int:
        """Return how many rows there are."""

    @property
    def width(self) -> int:
        """Return the inputs of the longest row."""

    def fill(self, row: int, batch: Batch, at: int) -> None:
        """Write a row into row ``at`` of a blank batch."""


class Stream(NamedTuple):
    """One source's rows, and its share of all rows."""

    rows: Rows
    weight: float = 1.0


class Era(NamedTuple):
    """The run's rows from ``first`` on, whose blocks have these quotas [sources].

    ``before`` [sources]: rows that each source gave before the era.
    """

    first: int
    quotas: Numbers
    before: Numbers


class Shares(NamedTuple):
    """Padding and label shares of rows, over their positions."""

    padding: float
    labels: float  # of the positions without padding


class DataBatches:
    """Micro-batches of one source or several."""

    def __init__(self, streams: Sequence[Stream], spec: TrainSpec, padding_id: int) -> None:
        """Shuffle the streams with the spec's seed; short rows are padded with ``padding_id``."""
        self._rows = [each.rows for each in streams]
        self._spec = spec
        self._padding_id = padding_id
        no_rows = np.zeros(len(streams), dtype=np.int64)
        self._eras = [Era(0, _quotas([each.weight for each in streams]), no_rows)]
        self._orders: dict[int, tuple[int, Numbers]] = {}
        self._block = NO_BLOCK
        is_packed = spec.samples.rows == "packed"
        longest = max(each.width for each in self._rows)
        self._width = longest if is_packed else None
        self._lengths = padded_lengths(longest)

    def follow(self, history: Sequence[Sequence[float]]) -> None:
        """Restore moved weights: one entry per ``move`` call, the oldest first."""
        del self._eras[1:]
        for first, *weights in history:
            self.move(int(first), weights)

    def move(self, first: int, weights: Sequence[float]) -> None:
        """Draw with these weights [sources] from the run's row ``first`` on."""
        last = self._eras[-1]
        blocks, rest = divmod(first - last.first, BLOCK_ROWS)
        partial_block = self._sources(last, blocks)[:rest]
        rows_given = blocks * last.quotas + np.bincount(partial_block, minlength=len(self._rows))
        self._eras.append(Era(first, _moved_quotas(weights), last.before + rows_given))
        self._block = NO_BLOCK  # the cached block may be of an era with the same first row

    def micro_batch(self, step: int, micro_step: int) -> Batch:
        """Return one micro-batch of at most [micro_batch_size, sequence_length]."""
        chosen = self._row_indices(step, micro_step)
        batch = self._blank(len(chosen), self._width or self._longest(chosen))
        for at, (source, row) in enumerate(chosen):
            self._rows[source].fill(row, batch, at)
        return batch

    def _blank(self, rows: int, length: int) -> Batch:
        """Return a batch of padding."""
        shape = (rows, length)
        return Batch(
            torch.full(shape, self._padding_id),
            torch.full(shape, IGNORED),
            torch.zeros(shape, dtype=torch.int64) if self._width else None,
        )

    def num_tokens(self, step: int, micro_step: int) -> int:
        """Return the number of a micro-batch's positions without padding."""
        chosen = self._row_indices(step, micro_step)
        return sum(int(self._rows[source].lengths[row]) for source, row in chosen)

    def shares(self) -> Shares:
        """Return the shares of the first micro-batches: one epoch, or ``COUNTED_BATCHES``."""
        size = self._spec.micro_batch_size
        num_rows = sum(map(len, self._rows))
        count = max(1, min(COUNTED_BATCHES, num_rows // size))
        positions = tokens = labels = 0
        for number in range(count):
            at = divmod(number, self._spec.gradient_accumulation_steps)
            batch = self.micro_batch(*at)
            positions += batch.input_ids.numel()
            tokens += self.num_tokens(*at)
            labels += batch.num_labels
        return Shares(1.0 - tokens / positions, labels / tokens)

    def _row_indices(self, step: int, micro_step: int) -> list[tuple[int, int]]:
        """Return source and row of each row of a micro-batch."""
        first = step * self._spec.gradient_accumulation_steps + micro_step
        first *= self._spec.micro_batch_size
        return [self._row(first + at) for at in range(self._spec.micro_batch_size)]

    def _longest(self, chosen: Sequence[tuple[int, int]]) -> int:
        longest = max(int(self._rows[source].lengths[row]) for source, row in chosen)
        return padded_length(longest, self._lengths)

    def _row(self, number: int) -> tuple[int, int]:
        """Return the source and the source's row of the run's row with this number."""
        if len(self._rows) == 1:
            return 0, self._shuffled_row(0, number)
        era = self._eras[bisect_right(self._eras, number, key=lambda each: each.first) - 1]
        block, at = divmod(number - era.first, BLOCK_ROWS)
        sources = self._sources(era, block)
        source = int(sources[at])
        before = era.before[source] + block * era.quotas[source]
        before += np.count_nonzero(sources[:at] == source)
        return source, self._shuffled_row(source, int(before))

    def _sources(self, era: Era, block: int) -> Numbers:
        """Return the source of each row of an era's block."""
        if self._block[0] != (era.first, block):
            seeds = (self._spec.seed, len(self._rows), block, era.first)
            block_sources = np.repeat(np.arange(len(self._rows)), era.quotas)
            self._block = (
                (era.first, block),
                np.random.default_rng(seeds).permutation(block_sources),
            )
        return self._block[1]

    def _shuffled_row(self, source: int, number: int) -> int:
        """Return the shuffled index of a source's row with this number."""
        epoch, at = divmod(number, len(self._rows[source]))
        if self._orders.get(source, (-1, None))[0] != epoch:
            generator = np.random.default_rng((self._spec.seed, source, epoch))
            self._orders[source] = epoch, generator.permutation(len(self._rows[source]))
        return int(self._orders[source][1][at])


def padded_lengths(longest: int) -> Numbers:
    """Return the padded batch lengths in tokens, evenly spaced up to the longest row.

    A library that builds kernels per shape caches them: a hundred lengths took 100 MB, and the
    time to build them.
    """
    steps = np.arange(1, PADDED_LENGTHS + 1)
    return np.unique(-(-longest * steps // PADDED_LENGTHS))


def padded_length(longest: int, lengths: Numbers) -> int:
    """Return the smallest padded length that fits rows of ``longest`` tokens."""
    return int(lengths[np.searchsorted(lengths, longest)])


def _quotas(weights: Sequence[float]) -> Numbers:
    """Return the rows of each source per block, at least one.

    Raises:
        BadInputError: a source's weight is too small for one row per block.
    """
    if min(weights) * BLOCK_ROWS < 1.0:
        msg = (
            f"a source's weight is {min(weights):.2g} of all; at least 1/{BLOCK_ROWS} is: leave "
            "the source out, or give it more"
        )
        raise BadInputError(msg)
    return _shared_out(weights)


def _moved_quotas(weights: Sequence[float]) -> Numbers:
    """Return the quotas of moved weights, at least one row per source."""
    quotas = _shared_out(weights)
    for source in np.flatnonzero(quotas == 0):
        quotas[np.argmax(quotas)] -= 1
        quotas[source] = 1
    return quotas


def _shared_out(weights: Sequence[float]) -> Numbers:
    """Return a block's rows in proportion to weights that sum to 1, by largest remainder."""
    exact = np.asarray(weights, dtype=np.float64) * BLOCK_ROWS
    whole = exact.astype(np.int64)
    by_remainder = np.argsort(whole - exact, kind="stable")
    whole[by_remainder[: BLOCK_ROWS - int(whole.sum())]] += 1
    return whole
