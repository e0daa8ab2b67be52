"""Records for TRL's trainers: read, refused by line and field, and what becomes of them."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from runners.datasets.conversations import ChatSample, DataError
from runners.datasets.preferences import PreferenceSample, PromptSample, RatedSample, columns_of
from runners.datasets.records import (
    CompletionSample,
    Reader,
    Record,
    Sample,
    left_out_words,
    part_words,
)
from runners.jobs.data_files import DataFile
from runners.jobs.runtime import BadInputError
from runners.jobspec.base import PackingStrategy
from runners.jobspec.objectives import OBJECTIVES, Objective

SHOWN_RECORDS = 20
SHOWN_CHARACTERS = 2000  # of a sequence
LEAST_RECORDS = 2
DIVIDING = ("bfd_split", "wrapped")  # ways to pack that cut nothing off


@dataclass
class TrainingRecords:
    """The records of a training as JSON lines with TRL's columns, and what reading them found."""

    path: Path
    digest: str  # SHA-256 of the files that were read
    num_records: int = 0
    num_chats: int = 0  # records of messages, which the chat template writes
    num_equal: int = 0  # pairs of two equal answers
    labels: dict[str, int] = field(default_factory=dict)  # rated answers by their label
    remarks: list[str] = field(default_factory=list)

    def add(self, sample: Sample) -> dict[str, object]:
        """Count a sample and return its columns."""
        self.num_records += 1
        columns = trl_columns(sample)
        self.num_chats += any(isinstance(value, list) for value in columns.values())
        if isinstance(sample, PreferenceSample):
            self.num_equal += sample.chosen == sample.rejected
        if isinstance(sample, RatedSample):
            name = "wanted" if sample.label else "not wanted"
            self.labels[name] = self.labels.get(name, 0) + 1
        return columns


def trl_columns(sample: Sample) -> dict[str, object]:
    """Return a sample in the columns that TRL's trainers read."""
    if isinstance(sample, PreferenceSample | RatedSample | PromptSample):
        return columns_of(sample)
    if isinstance(sample, ChatSample):
        tools = {"tools": json.loads(sample.tools)} if sample.tools else {}
        return {"messages": [turn.message() for turn in sample.turns], **tools}
    if isinstance(sample, CompletionSample):
        return sample._asdict()
    return {"text": sample.text}


def read_records(data: DataFile, objective: Objective, target: Path) -> TrainingRecords:
    """Write the records that an objective learns from as JSON lines; refuse any other.

    Raises:
        BadInputError: a record is invalid or of another objective; the text names its line and
            field.
    """
    try:
        reader = data.reader()
        found = TrainingRecords(target, data.digest())
        with target.open("w") as lines:
            for record in _of(objective, data.records(reader), reader):
                lines.write(f"{json.dumps(found.add(record.sample))}\n")
    except DataError as error:
        raise BadInputError(str(error)) from None
    if found.num_records < LEAST_RECORDS:
        raise BadInputError(f"{data.name} holds {found.num_records} records; give at least two")
    if len(found.labels) == 1:
        (only,) = found.labels
        raise BadInputError(
            f"{data.name}: every “label” says {only}; {objective.title} learns from both, so add "
            "records of the other"
        )
    found.remarks = list(_remarks(data.name, reader, found))
    return found


def _of(objective: Objective, records: Iterator[Record], reader: Reader) -> Iterator[Record]:
    for record in records:
        if reader.format not in objective.formats:
            others = [each.title for each in OBJECTIVES.values() if reader.format in each.formats]
            way_out = f"; choose {' or '.join(others)}" if others else ""
            raise DataError(
                f"{reader.name}: line {record.line}: its fields are of the format "
                f"{reader.format}, and {objective.title} learns from "
                f"{', '.join(objective.formats)}{way_out}"
            )
        yield record


def _remarks(name: str, reader: Reader, found: TrainingRecords) -> Iterator[str]:
    if part := part_words(name):
        yield part
    if reader.num_empty:
        yield f"{name}: {reader.num_empty:,} records without an answer to learn are left out"
    if reader.left_out:
        yield f"{name}: {left_out_words(reader.left_out)}"
    if found.num_equal:
        yield f"{name}: {found.num_equal:,} pairs have two equal answers, which teach nothing"


# What the trainer reads: the records as tokens, from the data that it has prepared.


class Prepared(Protocol):
    """The prepared data of one of TRL's trainers: rows of token ids by column."""

    def __len__(self) -> int:
        """Return how many rows there are."""

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        """Return a row."""


@dataclass
class DataReport:
    """What became of the records: the first ones in full, and the lengths of all in tokens."""

    num_records: int
    num_rows: int
    lengths: list[int]
    longest: int  # tokens that a sequence keeps
    first: list[dict[str, Any]]
    packing: PackingStrategy | None = None

    @property
    def num_cut(self) -> int:
        """Return how many sequences reach the limit, where they are cut; divided ones are not."""
        if self.packing in DIVIDING:
            return 0
        return sum(each >= self.longest for each in self.lengths)

    @property
    def num_left_out(self) -> int:
        """Return how many records are in no row."""
        return self.num_records - self.num_kept

    @property
    def num_kept(self) -> int:
        """Return how many records are trained on; a packed row has several, or parts of them."""
        if self.packing in DIVIDING:
            return self.num_records
        return len(self.lengths) if self.packing else self.num_rows

    def figures(self) -> dict[str, float]:
        """Return the counts for the result."""
        return {
            "data_documents": float(self.num_kept),
            "data_tokens": float(sum(min(each, self.longest) for each in self.lengths)),
            "data_cut": float(self.num_cut),
            "data_left_out": float(self.num_left_out),
        }

    def document(self) -> dict[str, Any]:
        """Return the report as the job's page and its file show it."""
        ordered = sorted(self.lengths)
        tokens = {
            name: ordered[min(len(ordered) - 1, int(share * len(ordered)))]
            for name, share in (("median", 0.5), ("p95", 0.95), ("longest", 1.0))
        }
        return {
            "records": self.num_records,
            "left_out": self.num_left_out,
            "rows": self.num_rows,
            "sequences": len(self.lengths),
            "sequences_cut": self.num_cut,
            "max_length": self.longest,
            "tokens": tokens,
            "first": self.first,
        }


def data_report(
    objective: Objective,
    prepared: Prepared,
    decode: Callable[[list[int]], str],
    found: int,
    longest: int,
    packing: PackingStrategy | None = None,
) -> DataReport:
    """Return what a trainer's prepared data holds, of ``found`` records.

    A packed row has the sequences of several records, or of parts of them.

    Raises:
        BadInputError: nothing is left within the maximum length.
    """
    if not len(prepared):
        raise BadInputError(
            f"nothing is left to learn: all {found:,} records are longer than sequence_length, "
            f"which is {longest}; raise it"
        )
    lengths: list[int] = []
    first: list[dict[str, Any]] = []
    for at in range(len(prepared)):
        for sequences in unpacked(sequences_of(objective, prepared[at]), prepared[at]):
            lengths += map(len, sequences.values())
            if len(first) < SHOWN_RECORDS:
                first.append({
                    name: {
                        "tokens": len(ids),
                        "cut": len(ids) > longest,
                        "text": decode(ids[:longest])[:SHOWN_CHARACTERS],
                    }
                    for name, ids in sequences.items()
                })  # fmt: skip
    return DataReport(found, len(prepared), lengths, longest, first, packing)


def unpacked(
    sequences: dict[str, list[int]], row: Mapping[str, Any]
) -> Iterator[dict[str, list[int]]]:
    """Yield the sequences of a row for each text in it; wrapped rows do not say where one ends."""
    start = 0
    for length in row.get("seq_lengths") or [None]:
        end = None if length is None else start + length
        yield {name: ids[start:end] for name, ids in sequences.items()}
        start = end or 0


def sequences_of(objective: Objective, row: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the token ids of a prepared row by the names of its sequences."""
    return {
        name: [token for column in columns for token in row[column]]
        for name, columns in objective.sequences.items()
    }
