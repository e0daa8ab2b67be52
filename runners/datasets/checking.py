"""Looks through a file of training data before anything is trained on it."""

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
    """A part of a sample as a person sees it: who says it, and how it begins."""

    who: str
    text: str


class Checked(NamedTuple):
    """What a file holds; with an error nothing can be trained on it."""

    format: Format | None
    num_records: int
    num_empty: int
    samples: tuple[tuple[Part, ...], ...]  # the first few
    errors: tuple[str, ...]  # the first few


def checked(file: BinaryIO, name: str, stated: Format | None = None) -> Checked:
    """Return what is in a file, with the first errors of its lines; every line is read.

    Raises:
        DataError: files of this kind are not read.
    """
    reader = Reader(name, stated)
    count, is_varied = 0, False
    samples: list[tuple[Part, ...]] = []
    errors: list[str] = []
    before: bytes | None = None
    try:
        for sample in _samples(reader, file, errors):
            count += 1
            if count > MAX_RECORDS:
                errors.append(f"{name} has more than {MAX_RECORDS:,} records; divide it")
                break
            if not is_varied:
                digest = digest_of(sample)
                is_varied, before = before not in {None, digest}, digest
            if len(samples) < FIRST_SAMPLES:
                samples.append(excerpt(sample))
    except DataError as error:
        errors.append(str(error))
    if not errors and not is_varied:
        errors.append(too_few(name, count))
    return Checked(reader.format, count, reader.num_empty, tuple(samples), tuple(errors))


def too_few(name: str, count: int) -> str:
    """Return why a file with fewer than two different records teaches nothing."""
    held = "no record" if not count else "only one record" if count == 1 else "one record, again"
    return f"{name} holds {held}; give at least two that differ: one is kept to judge by"


def _samples(reader: Reader, file: BinaryIO, errors: list[str]) -> Iterator[Sample]:
    """Yield what can be read; what cannot is noted, up to a handful."""
    for line, raw in reader.pieces(file):
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
    """Return a sample's parts, each cut to what a page has room for."""
    if isinstance(sample, ChatSample):
        parts = [Part(turn.role, turn.content) for turn in sample.turns]
    elif isinstance(sample, CompletionSample):
        parts = [Part("prompt", sample.prompt), Part("completion", sample.completion)]
    elif isinstance(sample, LabelledSample):
        parts = [Part("text", sample.text), Part("label", sample.label)]
    else:
        parts = [Part("text", sample.text)]
    return tuple(Part(each.who, each.text[:EXCERPT_CHARACTERS]) for each in parts[:8])
