"""A file of training data in tokens: written once to the host's cache, read from there by map.

Two passes over the file: one names every record by its content and so decides what is kept to
judge by, one tokenises. Neither holds more than a handful of records.
"""

# mypy: disable-error-code="no-untyped-call"
# transformers ships types, but leaves some of its functions without.

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from runners.datasets.checking import too_few
from runners.datasets.records import (
    DataError,
    Format,
    Reader,
    Record,
    digest_of,
    num_characters,
)
from runners.jobs.corpus import HELD_OUT_ONE_IN
from runners.jobs.runtime import BadInputError
from runners.jobs.tokenizer import TokenIds, cached_folder, tokenizer_digest
from runners.jobs.train.rendering import Rendered, Renderer, give_template

LAYOUT_VERSION = 1  # raise when what lies in the cache changes its meaning
BATCH_CHARACTERS = 2**20
BATCH_RECORDS = 256
READ_BYTES = 2**20
Learnt = npt.NDArray[np.uint8]


class Documents(NamedTuple):
    """Samples in tokens, one after the other.

    ``ids`` and ``learnt`` [tokens]: of which tokens a loss is taken; ``offsets`` [samples + 1]:
    where each begins.
    """

    ids: TokenIds
    learnt: Learnt
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        """Return how many samples there are."""
        return len(self.offsets) - 1


class Tokenised(NamedTuple):
    """A file's two parts, and how it was read."""

    train: Documents
    held_out: Documents
    facts: dict[str, object]


@dataclass(frozen=True)
class DataFile:
    """An opened file and the name that people know it by; the handle stays open."""

    name: str
    file: BinaryIO
    format: Format | None = None

    def digest(self) -> str:
        """Return the SHA-256 of the file."""
        self.file.seek(0)
        digest = hashlib.sha256()
        while piece := self.file.read(READ_BYTES):
            digest.update(piece)
        return digest.hexdigest()

    def records(self, reader: Reader) -> Iterator[Record]:
        """Yield the file's records from its beginning."""
        self.file.seek(0)
        return reader.records(self.file)


def tokenised_file(
    data: DataFile, digest: str, tokenizer: PreTrainedTokenizerFast, cache_dir: Path
) -> Tokenised:
    """Return a file in tokens: from the cache, or read and kept there.

    Raises:
        BadInputError: the file, or a record of it, cannot be learnt from.
    """
    try:
        reader = Reader(data.name, data.format)
        is_template_ours = give_template(tokenizer)
        parts = [LAYOUT_VERSION, digest, reader.suffix, data.format, tokenizer.chat_template]
        key = json.dumps([*map(str, parts), tokenizer_digest(tokenizer)]).encode()
        folder = cached_folder(
            cache_dir,
            f"samples-{hashlib.sha256(key).hexdigest()[:24]}",
            lambda target: _write(data, tokenizer, target),
        )
    except DataError as error:
        raise BadInputError(str(error)) from None
    facts = json.loads((folder / "facts.json").read_text())
    facts["is_template_ours"] = is_template_ours and facts["num_chats"] > 0
    return Tokenised(_read(folder / "train"), _read(folder / "held_out"), facts)


def _read(folder: Path) -> Documents:
    return Documents(
        np.memmap(folder / "ids", dtype=np.int32, mode="r"),
        np.memmap(folder / "learnt", dtype=np.uint8, mode="r"),
        np.fromfile(folder / "offsets", dtype=np.int64),
    )


# The first pass: what is kept to judge by


class Split:
    """Which samples are kept from training, by their content alone: equal ones stay together."""

    def __init__(self, digests: Iterator[bytes], name: str) -> None:
        """Look at every sample once, so that each side gets at least one.

        Raises:
            DataError: there are no two samples that differ.
        """
        self._least, self._greatest = b"\xff" * 33, b""
        count, num_held_out = 0, 0
        for digest in digests:
            count += 1
            num_held_out += _is_sixteenth(digest)
            self._least, self._greatest = min(self._least, digest), max(self._greatest, digest)
        if count == 0 or self._least == self._greatest:
            raise DataError(too_few(name, count))
        self._takes_least = num_held_out == 0
        self._gives_greatest = num_held_out == count

    def is_held_out(self, digest: bytes) -> bool:
        """Return whether the sample of this digest is kept from training."""
        if self._takes_least:
            return digest == self._least
        return _is_sixteenth(digest) and not (self._gives_greatest and digest == self._greatest)


def _is_sixteenth(digest: bytes) -> bool:
    return int.from_bytes(digest[-4:]) % HELD_OUT_ONE_IN == 0


# The second pass: tokens


class _Writer:
    """Appends samples to one part's files."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        folder.mkdir()
        opened = ((folder / name).open("wb") for name in ("ids", "learnt", "offsets"))
        self._ids, self._learnt, self._offsets = map(stack.enter_context, opened)
        self._end = 0
        self._offsets.write(np.int64(0).tobytes())

    def add(self, ids: list[int], learnt: Learnt) -> None:
        self._end += len(ids)
        self._ids.write(np.asarray(ids, dtype=np.int32).tobytes())
        self._learnt.write(learnt.tobytes())
        self._offsets.write(np.int64(self._end).tobytes())

    def finish(self) -> None:
        """End each file with one token more: a map of nothing cannot be made."""
        self._ids.write(np.int32(0).tobytes())
        self._learnt.write(np.uint8(0).tobytes())
        for file in (self._ids, self._learnt, self._offsets):
            file.flush()
            os.fsync(file.fileno())


class Encoder:
    """Turns records into tokens, and says of which a loss is taken and who is judged by them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, split: Split, name: str) -> None:
        """Encode the records of the file ``name``."""
        self._tokenizer = tokenizer
        self._split = split
        self._name = name
        self._renderer = Renderer(tokenizer)
        self.counts = {"num_records": 0, "num_held_out": 0, "num_chats": 0}

    @property
    def num_last_only(self) -> int:
        """Return of how many chats the last answer alone is learnt."""
        return self._renderer.num_last_only

    def encoded(self, batch: list[Record]) -> Iterator[tuple[bool, list[int], Learnt]]:
        """Yield of each record whether it is held out, its tokens, and which are learnt."""
        rendered = [
            self._renderer.rendered(each.sample, f"{self._name}: line {each.line}")
            for each in batch
        ]
        is_chat = rendered[0].is_chat  # one file holds one format
        found = self._tokenizer(
            [each.text for each in rendered],
            add_special_tokens=not is_chat,
            return_offsets_mapping=True,
            verbose=False,
        )
        for at, record in enumerate(batch):
            ids = found["input_ids"][at]
            learnt = _learnt(found["offset_mapping"][at], rendered[at])
            if not is_chat:
                ids, learnt = _ended(ids, learnt, self._tokenizer.eos_token_id)
            is_held_out = self._split.is_held_out(digest_of(record.sample))
            self.counts["num_held_out"] += is_held_out
            yield is_held_out, ids, learnt
        self.counts["num_records"] += len(batch)
        self.counts["num_chats"] += len(batch) * is_chat


def _write(data: DataFile, tokenizer: PreTrainedTokenizerFast, target: Path) -> None:
    first = Reader(data.name, data.format)
    split = Split((digest_of(each.sample) for each in data.records(first)), data.name)
    reader = Reader(data.name, first.format)
    encoder = Encoder(tokenizer, split, data.name)
    with ExitStack() as stack:
        train, held_out = (_Writer(target / name, stack) for name in ("train", "held_out"))
        for batch in in_handfuls(data.records(reader)):
            for is_held_out, ids, learnt in encoder.encoded(batch):
                (held_out if is_held_out else train).add(ids, learnt)
        train.finish()
        held_out.finish()
    facts = {
        "format": reader.format,
        "num_empty": reader.num_empty,
        "num_last_only": encoder.num_last_only,
        **encoder.counts,
    }
    (target / "facts.json").write_text(json.dumps(facts))


def _learnt(offsets: list[tuple[int, int]], rendered: Rendered) -> Learnt:
    """Return of which tokens a loss is taken: those that begin within a learnt part."""
    begins, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    found = np.zeros(len(begins), dtype=np.uint8)
    for begin, end in rendered.spans:
        found |= ((begins >= begin) & (begins < end) & (ends > begins)).astype(np.uint8)
    return found


def _ended(ids: list[int], learnt: Learnt, end: int | None) -> tuple[list[int], Learnt]:
    """Return a text's tokens with the end of text after them, which is learnt too."""
    if end is None:
        return ids, learnt
    if ids and ids[-1] == end:
        ids, learnt = ids[:-1], learnt[:-1]
    return [*ids, end], np.append(learnt, np.uint8(1))


def in_handfuls(records: Iterator[Record]) -> Iterator[list[Record]]:
    """Yield the records in handfuls that a tokenizer takes at once, none of them empty."""
    held: list[Record] = []
    size = 0
    for record in records:
        held.append(record)
        size += num_characters(record.sample)
        if len(held) >= BATCH_RECORDS or size >= BATCH_CHARACTERS:
            yield held
            held, size = [], 0
    if held:
        yield held
