"""Samples as rows, packed or one per row, their masks, and the rows of each step."""

import contextlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import masking_utils

from runners.jobs.corpus import TokenIds
from runners.jobs.runtime import BadInputError
from runners.jobs.train.tokenised_samples import Documents, Learnt
from runners.jobspec import SampleOptions, TrainSpec

# Attention masks of rows that hold one text each, without a look at their positions.


CHECK = "find_packed_sequence_indices"  # transformers 5: whether positions restart within a row


@contextlib.contextmanager
def one_text_per_row() -> Iterator[None]:
    """Build masks within the block as for rows of one text.

    Without a mask, transformers looks for packed texts in the positions of every forward pass, and
    with it waits until the device has finished the micro-batch before.
    """

    def none_packed(_position_ids: torch.Tensor) -> None:
        return None

    if not hasattr(masking_utils, CHECK):
        yield
        return
    looks = getattr(masking_utils, CHECK)
    setattr(masking_utils, CHECK, none_packed)
    try:
        yield
    finally:
        setattr(masking_utils, CHECK, looks)


# The micro-batches of a step, determined by the step number alone.
#
# A resumed run therefore sees the same data as an uninterrupted one, on any number of ranks.


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
        """Return a micro-batch of token ids and labels, each of [rows, length].

        ``step`` and ``micro_step`` count from 0 and are all that it depends on: it is the same on
        every rank and after a restart.
        """

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
        """Return one micro-batch of token ids and labels, [micro_batch_size, sequence_length].

        Its windows start at random positions, drawn from the seed, the step and the micro-step.
        """
        spec = self._spec
        generator = np.random.default_rng((spec.seed, step, micro_step))
        length = self._length
        starts = generator.integers(0, len(self._ids) - length, size=spec.micro_batch_size)
        rows = np.stack([self._ids[at : at + length + 1] for at in starts]).astype(np.int64)
        drawn = torch.from_numpy(rows)
        return Batch(drawn[:, :-1], drawn[:, 1:])


Numbers = npt.NDArray[np.int64]


class Segments(NamedTuple):
    """Pieces of samples: ``lengths`` inputs [pieces] from ``begins``, plus one more token each.

    ``num_cut`` samples were too long; ``num_left_out`` had no label.
    """

    begins: Numbers
    lengths: Numbers
    num_cut: int = 0
    num_left_out: int = 0


def segments_of(
    documents: Documents, longest: int, options: SampleOptions, *, is_text: bool
) -> Segments:
    """Return the pieces of samples, each of at most ``longest`` inputs.

    Plain text is cut into several pieces, so that nothing is lost; of other samples the beginning
    is kept. Pieces without a label are left out.
    """
    begins, lengths = documents.offsets[:-1], np.diff(documents.offsets) - 1
    is_long = lengths > longest
    if options.too_long == "leave_out":
        is_kept = ~is_long
        begins, lengths = begins[is_kept], lengths[is_kept]
    elif is_text:
        begins, lengths = _cut(begins, lengths, longest)
    else:
        lengths = np.minimum(lengths, longest)
    has_labels = _num_labels(documents.learnt, begins, lengths) > 0
    is_cut = options.too_long == "cut"
    num_left_out = int((~has_labels).sum()) + (0 if is_cut else int(is_long.sum()))
    return Segments(
        begins[has_labels],
        lengths[has_labels],
        int(is_long.sum()) if is_cut else 0,
        num_left_out,
    )


def _cut(begins: Numbers, lengths: Numbers, longest: int) -> tuple[Numbers, Numbers]:
    """Return consecutive pieces: every token but a sample's first is a label once."""
    counts = np.maximum(1, -(-lengths // longest))
    owners = np.repeat(np.arange(len(lengths)), counts)
    nth = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = nth * longest
    return begins[owners] + starts, np.minimum(longest, lengths[owners] - starts)


def _num_labels(learnt: Learnt, begins: Numbers, lengths: Numbers) -> Numbers:
    counts = np.zeros(len(begins), dtype=np.int64)
    for at, (begin, length) in enumerate(zip(begins.tolist(), lengths.tolist(), strict=True)):
        if length > 0:
            counts[at] = np.count_nonzero(learnt[begin + 1 : begin + 1 + length])
    return counts


def windows_of(ids: TokenIds, length: int) -> tuple[Documents, Segments]:
    """Return one long text as consecutive windows, each a piece."""
    length = min(length, len(ids) - 1)
    begins = np.arange(0, len(ids) - length, length, dtype=np.int64)
    learnt = np.ones(1, dtype=np.uint8)
    all_learnt = np.broadcast_to(learnt, (len(ids),))
    documents = Documents(ids, all_learnt, np.array([0, len(ids)], dtype=np.int64))
    return documents, Segments(begins, np.full(len(begins), length, dtype=np.int64))


# Rows


class Rows:
    """Rows of pieces: which pieces each row has, and their tokens."""

    def __init__(self, documents: Documents, pieces: Segments, packed: list[list[int]]) -> None:
        """Create one row for each list of pieces."""
        self._documents = documents
        self._pieces = pieces
        self._packed = packed
        self.lengths = np.array(
            [sum(int(pieces.lengths[each]) for each in row) for row in packed], dtype=np.int64
        )

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self._packed)

    @property
    def width(self) -> int:
        """Return the inputs of the longest row."""
        return int(self.lengths.max(initial=0))

    def fill(self, row: int, batch: Batch, at: int) -> None:
        """Write a row's inputs, labels and positions into row ``at`` of a blank batch."""
        ids, learnt, _ = self._documents
        column = 0
        for piece in self._packed[row]:
            begin, length = int(self._pieces.begins[piece]), int(self._pieces.lengths[piece])
            read = torch.from_numpy(np.asarray(ids[begin : begin + length + 1], dtype=np.int64))
            is_label = torch.from_numpy(learnt[begin + 1 : begin + 1 + length] > 0)
            place = slice(column, column + length)
            batch.input_ids[at, place] = read[:-1]
            batch.labels[at, place] = torch.where(is_label, read[1:], IGNORED)
            if batch.position_ids is not None:
                batch.position_ids[at, place] = torch.arange(length)
            column += length
        if batch.position_ids is not None:  # padding is a document of its own
            batch.position_ids[at, column:] = torch.arange(batch.input_ids.shape[1] - column)


def rows_of(documents: Documents, pieces: Segments, longest: int, options: SampleOptions) -> Rows:
    """Return the pieces in rows of at most ``longest`` inputs, packed or not."""
    if options.rows == "packed":
        packed = best_fit(pieces.lengths.tolist(), longest)
    else:
        packed = [[each] for each in range(len(pieces.lengths))]
    return Rows(documents, pieces, packed)


def best_fit(lengths: list[int], longest: int) -> list[list[int]]:
    """Pack pieces into rows of at most ``longest``: longest first, into the fullest row that fits.

    Source: Ding et al. 2024, arXiv:2404.10830, algorithm 1 (best-fit decreasing).
    """
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # room left -> rows
    rooms: list[int] = []  # keys of open_rows, in ascending order
    for piece in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        length = lengths[piece]
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, room = len(rows), longest
            rows.append([])
        else:
            room = rooms[at]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], rooms[at]
        rows[row].append(piece)
        left = room - length
        if left > 0:
            if left not in open_rows:
                open_rows[left] = []
                insort(rooms, left)
            open_rows[left].append(row)
    return rows


# GrowLength: short sequences first, then longer ones, with the same tokens per step.
#
# Source: Jin et al. 2023 (GrowLength), arXiv:2310.00576, section 3.


class GrowingBatches:
    """Micro-batches whose length depends on the step number."""

    def __init__(self, stages: list[tuple[int, Batches]]) -> None:
        """Use each stage's batches until its step; the last stage has no end."""
        self._stages = stages

    def micro_batch(self, step: int, micro_step: int) -> Batch:
        """Return a micro-batch of token ids and labels in the length of the step's stage."""
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


# The rows of each step: every source is shuffled once per epoch.
#
# With several sources, each block of rows contains each source's exact quota. Any rank and any
# resumed run finds its rows from the step number, and with moving weights from their history.


BLOCK_ROWS = 1024  # with several sources: the rows over which quotas hold exactly
PADDED_LENGTHS = 8  # distinct padded lengths at most: kernels are built and cached for each
COUNTED_BATCHES = 1024  # from a run's start, to estimate padding and label shares


Block = tuple[tuple[int, int], Numbers]  # (era's first row, block index), source of each row
NO_BLOCK: Block = ((0, -1), np.zeros(0, dtype=np.int64))


class RowSource(Protocol):
    """The rows of one source, and the number of inputs of each."""

    lengths: Numbers

    def __len__(self) -> int:
        """Return how many rows there are."""

    @property
    def width(self) -> int:
        """Return the inputs of the longest row."""

    def fill(self, row: int, batch: Batch, at: int) -> None:
        """Write a row into row ``at`` of a blank batch."""


class WeightedRows(NamedTuple):
    """One source's rows, and its share of all rows."""

    rows: RowSource
    weight: float = 1.0


class QuotaPeriod(NamedTuple):
    """The run's rows from ``first`` on, whose blocks have these quotas [sources].

    ``before`` [sources]: rows that each source gave before the era.
    """

    first: int
    quotas: Numbers
    before: Numbers


class RowRatios(NamedTuple):
    """Padding and label shares of rows, over their positions."""

    padding: float
    labels: float  # of the positions without padding


class DataBatches:
    """Micro-batches of one source or several."""

    def __init__(self, streams: Sequence[WeightedRows], spec: TrainSpec, padding_id: int) -> None:
        """Shuffle the streams with the spec's seed; short rows are padded with ``padding_id``."""
        self._rows = [each.rows for each in streams]
        self._spec = spec
        self._padding_id = padding_id
        no_rows = np.zeros(len(streams), dtype=np.int64)
        self._eras = [QuotaPeriod(0, _quotas([each.weight for each in streams]), no_rows)]
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
        self._eras.append(QuotaPeriod(first, _moved_quotas(weights), last.before + rows_given))
        self._block = NO_BLOCK  # the cached block may be of an era with the same first row

    def micro_batch(self, step: int, micro_step: int) -> Batch:
        """Return one micro-batch of token ids and labels, [micro_batch_size, length].

        ``length`` is ``sequence_length`` for packed rows, else that of the longest row, padded.
        """
        chosen = self._row_indices(step, micro_step)
        batch = self._blank(len(chosen), self._width or self._longest(chosen))
        for at, (source, row) in enumerate(chosen):
            self._rows[source].fill(row, batch, at)
        return batch

    def _blank(self, rows: int, length: int) -> Batch:
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

    def shares(self) -> RowRatios:
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
        return RowRatios(1.0 - tokens / positions, labels / tokens)

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

    def _sources(self, era: QuotaPeriod, block: int) -> Numbers:
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
