"""Samples as rows: packed or one per row; longer ones are cut.

Packing depends on the lengths only, and the order of rows on the seed and their number, so that
every rank and every resumed run reads the same.
"""

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from runners.jobs.tokenizer import TokenIds
from runners.jobs.train.batches import IGNORED, Batch
from runners.jobs.train.samples import Documents, Learnt
from runners.jobspec import SampleOptions

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
    """Return the number of labels of each piece."""
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
