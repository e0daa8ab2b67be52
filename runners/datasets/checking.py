"""Validates a training data file before training."""

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from runners.datasets.records import (
    MAX_RECORDS,
    ChatSample,
    CompletionSample,
    DataError,
    Format,
    LabelledSample,
    Reader,
    Sample,
    digest_of,
)

FIRST_SAMPLES = 3
MOST_ERRORS = 5
EXCERPT_CHARACTERS = 300


class Part(NamedTuple):
    """A part of a sample for display: its role and the beginning of its text."""

    who: str
    text: str


class Checked(NamedTuple):
    """The content of a file; with errors it cannot be trained on."""

    format: Format | None
    num_records: int
    num_empty: int
    samples: tuple[tuple[Part, ...], ...]  # the first few
    errors: tuple[str, ...]  # the first few


def checked(file: BinaryIO, name: str, stated: Format | None = None) -> Checked:
    """Return a file's content summary and its first errors; every line is read.

    Raises:
        DataError: the file type is not supported.
    """
    reader = Reader(name, stated)
    count, is_varied = 0, False
    samples: list[tuple[Part, ...]] = []
    errors: list[str] = []
    previous_digest: bytes | None = None
    try:
        for sample in _samples(reader, file, errors):
            count += 1
            if count > MAX_RECORDS:
                errors.append(f"{name} has more than {MAX_RECORDS:,} records; divide it")
                break
            if not is_varied:
                digest = digest_of(sample)
                is_varied, previous_digest = previous_digest not in {None, digest}, digest
            if len(samples) < FIRST_SAMPLES:
                samples.append(excerpt(sample))
    except DataError as error:
        errors.append(str(error))
    if not errors and not is_varied:
        errors.append(too_few(name, count))
    return Checked(reader.format, count, reader.num_empty, tuple(samples), tuple(errors))


def too_few(name: str, count: int) -> str:
    """Return the error of a file with fewer than two different records."""
    content = (
        "no record" if not count else "only one record" if count == 1 else "one record, again"
    )
    return f"{name} holds {content}; give at least two that differ: one is held out for evaluation"


def _samples(reader: Reader, file: BinaryIO, errors: list[str]) -> Iterator[Sample]:
    """Yield the readable samples; collect at most ``MOST_ERRORS`` errors."""
    for line, raw in reader.raw_records(file):
        try:
            sample = reader.sample(line, raw)
        except DataError as error:
            errors.append(str(error))
            if len(errors) >= MOST_ERRORS:
                return
            continue
        if sample is not None:
            yield sample


def excerpt(sample: Sample) -> tuple[Part, ...]:
    """Return a sample's parts, each truncated for display."""
    if isinstance(sample, ChatSample):
        parts = [Part(turn.role, turn.content) for turn in sample.turns]
    elif isinstance(sample, CompletionSample):
        parts = [Part("prompt", sample.prompt), Part("completion", sample.completion)]
    elif isinstance(sample, LabelledSample):
        parts = [Part("text", sample.text), Part("label", sample.label)]
    else:
        parts = [Part("text", sample.text)]
    return tuple(Part(each.who, each.text[:EXCERPT_CHARACTERS]) for each in parts[:8])
