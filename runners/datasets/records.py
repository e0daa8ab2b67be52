"""Reads and validates the records of a training file."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Literal, NamedTuple, get_args

from runners.datasets.parquet_process import UnreadableTableError, rows_in_subprocess

SUFFIXES = (".jsonl", ".parquet", ".txt")
Format = Literal["text", "chat", "instruction", "completion", "classification"]
FORMATS: tuple[Format, ...] = get_args(Format)
FIELDS: Mapping[Format, tuple[str, ...]] = {  # in the order of detection
    "chat": ("messages",),
    "instruction": ("instruction", "output"),
    "completion": ("prompt", "completion"),
    "classification": ("text", "label"),
    "text": ("text",),
}
ROLES = ("system", "user", "assistant")
MAX_LINE_BYTES = 4 * 1024**2
MAX_RECORDS = 2_000_000
MAX_DOCUMENT_CHARACTERS = 1024**2  # of a .txt file: a longer document is split
MIN_DOCUMENT_CHARACTERS = 2000  # paragraphs of a .txt file are joined up to this size
SHOWN_CHARACTERS = 80
MAX_LABEL_CHARACTERS = 100
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class DataError(ValueError):
    """A file or record is invalid; the text gives the reason."""


class Turn(NamedTuple):
    """One message of a conversation."""

    role: str
    content: str


class TextSample(NamedTuple):
    """Text; every token is trained on."""

    text: str


class CompletionSample(NamedTuple):
    """A prompt and a completion; only the completion is trained on."""

    prompt: str
    completion: str


class ChatSample(NamedTuple):
    """A conversation; only the assistant's turns are trained on."""

    turns: tuple[Turn, ...]


class LabelledSample(NamedTuple):
    """Text with its class label; next-token training uses the text alone."""

    text: str
    label: str


Sample = TextSample | CompletionSample | ChatSample | LabelledSample


class Record(NamedTuple):
    """One sample with its first line number, counted from 1."""

    line: int
    sample: Sample


def suffix_of(name: str) -> str:
    """Return the suffix of a training data file.

    Raises:
        DataError: the file type is not supported.
    """
    suffix = PurePosixPath(name).suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(
            f"{name}: files of training data end in {', '.join(SUFFIXES[:-1])} or "
            f"{SUFFIXES[-1]}, not {suffix or 'in nothing'!r}"
        )
    return suffix


def digest_of(sample: Sample) -> bytes:
    """Return the SHA-256 of a sample's content."""
    return hashlib.sha256(json.dumps(sample).encode()).digest()


def num_characters(sample: Sample) -> int:
    """Return the length of a sample in characters."""
    if isinstance(sample, ChatSample):
        return sum(len(turn.content) for turn in sample.turns)
    return sum(map(len, sample))


class Reader:
    """Reads and validates the records of one file."""

    def __init__(self, name: str, stated: Format | None = None) -> None:
        """Create a reader for a file name; the first record determines an unstated format.

        Raises:
            DataError: the file type is not supported.
        """
        self.name = name
        self.suffix = suffix_of(name)
        self.format: Format | None = "text" if self.suffix == ".txt" else stated
        self.num_empty = 0
        if self.suffix == ".txt" and stated not in {None, "text"}:
            raise DataError(
                f"{name}: a .txt file is plain text; {stated} needs JSON lines or Parquet"
            )

    def records(self, file: BinaryIO) -> Iterator[Record]:
        """Yield the non-empty records; ``num_empty`` counts the empty ones.

        Raises:
            DataError: a record is invalid, with its line and the reason.
        """
        count = 0
        for number, raw in self.raw_records(file):
            if (sample := self.sample(number, raw)) is None:
                continue
            count += 1
            if count > MAX_RECORDS:
                raise DataError(f"{self.name} has more than {MAX_RECORDS:,} records; divide it")
            yield Record(number, sample)

    def raw_records(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Yield each record's first line number and raw bytes: a line, row or document.

        Raises:
            DataError: a line is too long.
        """
        if self.suffix == ".txt":
            yield from self._documents(file)
        elif self.suffix == ".parquet":
            yield from self._rows(file)
        else:
            yield from self._lines(file)

    def sample(self, line: int, raw: bytes) -> Sample | None:
        """Return the sample of a record, or None for an empty one.

        Raises:
            DataError: the record is invalid, with its line, the reason and its first characters.
        """
        text = self._text(line, raw)
        if self.suffix == ".txt":
            parsed: Sample | None = TextSample(text) if text.strip() else None
        else:
            parsed = self._parsed(line, text.strip())
        self.num_empty += parsed is None
        return parsed

    # Lines

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            self._check_length(number, line)
            line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            if line.strip():
                yield number, line
            elif self.suffix == ".txt":
                yield number, b""

    def _documents(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Yield documents of a text: groups of whole paragraphs."""
        lines: list[bytes] = []
        size = begin = 0
        for number, line in self._lines(file):
            begin = number if not lines else begin
            lines.append(line or b"\n")
            size += len(line)
            is_enough = not line and size >= MIN_DOCUMENT_CHARACTERS
            if is_enough or size >= MAX_DOCUMENT_CHARACTERS:
                yield begin, b"".join(lines)
                lines, size = [], 0
        if size:
            yield begin, b"".join(lines)

    def _rows(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        fields = sorted({"input"}.union(*FIELDS.values()))
        try:
            for number, line in rows_in_subprocess(file, fields, MAX_LINE_BYTES):
                self._check_length(number, line)
                yield number, line
        except UnreadableTableError as error:
            raise DataError(f"{self.name}: {error}") from None

    def _check_length(self, number: int, line: bytes) -> None:
        if len(line) > MAX_LINE_BYTES:
            raise DataError(
                f"{self.name}: {self._record_noun} {number} is longer than "
                f"{MAX_LINE_BYTES // 1024**2} MiB; divide it into several records"
            )

    @property
    def _record_noun(self) -> str:
        return "row" if self.suffix == ".parquet" else "line"

    def _text(self, line: int, raw: bytes) -> str:
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise self._error(
                line, f"byte {error.start + 1} is not valid UTF-8; save the file as UTF-8", raw
            ) from None
        if "\0" in text:
            raise self._error(line, "it holds a null character; remove it", raw)
        return text

    # JSON

    def _parsed(self, line: int, text: str) -> Sample | None:
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            why = str(error).partition(": line")[0].removesuffix(" at")
            raise self._error(line, f"it is not valid JSON ({why})", text) from None
        if not isinstance(document, dict):
            raise self._error(line, "it is not a JSON object; write one object per line", text)
        if self.format is None:
            self.format = self._format_of(line, document, text)
        try:
            return _READERS[self.format](document)
        except DataError as error:
            raise self._error(line, str(error), text) from None

    def _format_of(self, line: int, document: Mapping[str, Any], text: str) -> Format:
        for each, fields in FIELDS.items():
            if all(field in document for field in fields):
                return each
        fields_present = ", ".join(sorted(map(str, document))[:8]) or "none"
        raise self._error(line, f"{_wanted()}; its fields are {fields_present[:200]}", text)

    def _error(self, line: int, reason: str, raw: bytes | str) -> DataError:
        text = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
        shown = json.dumps(text.strip()[:SHOWN_CHARACTERS], ensure_ascii=False)
        return DataError(f"{self.name}: {self._record_noun} {line}: {reason}. It begins {shown}")


def _wanted() -> str:
    listed = "; ".join(f"{each}: {', '.join(fields)}" for each, fields in FIELDS.items())
    return f"it has the fields of no known format ({listed})"


def _string(document: Mapping[str, Any], name: str, *, is_needed: bool = True) -> str:
    value = document.get(name, None if is_needed else "")
    if value is None and not is_needed:
        return ""
    if not isinstance(value, str):
        problem = "missing" if name not in document else f"not text but {type(value).__name__}"
        listed = ", ".join(sorted(map(str, document))[:8]) or "none"
        raise DataError(f"“{name}” is {problem}; its fields are {listed[:200]}")
    return storable(value, name)


def storable(text: str, name: str) -> str:
    """Return the text if every tokenizer accepts it.

    Raises:
        DataError: the text has a null character or a lone surrogate.
    """
    if "\0" in text:
        raise DataError(f"“{name}” holds a null character; remove it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"“{name}” holds half of a surrogate pair at character {error.start + 1}"
        ) from None
    return text


def _text(document: Mapping[str, Any]) -> TextSample | None:
    text = _string(document, "text")
    return TextSample(text) if text.strip() else None


def _completion(document: Mapping[str, Any]) -> CompletionSample | None:
    prompt, completion = _string(document, "prompt"), _string(document, "completion")
    return CompletionSample(prompt, completion) if completion.strip() else None


def _instruction(document: Mapping[str, Any]) -> ChatSample | None:
    parts = [_string(document, "instruction"), _string(document, "input", is_needed=False)]
    answer = _string(document, "output")
    if not answer.strip():
        return None
    prompt = "\n\n".join(part for part in parts if part.strip())
    return ChatSample((Turn("user", prompt), Turn("assistant", answer)))


def _chat(document: Mapping[str, Any]) -> ChatSample | None:
    messages = document.get("messages")
    if not isinstance(messages, list):
        raise DataError("“messages” is not a list of messages with “role” and “content”")
    turns = tuple(_turn(number, each) for number, each in enumerate(messages, 1))
    if not turns:
        return None
    if not any(turn.role == "assistant" for turn in turns):
        raise DataError("no message has the role “assistant”, and only those have a loss; add one")
    return ChatSample(turns)


def _turn(number: int, message: object) -> Turn:
    if not isinstance(message, dict):
        raise DataError(f"message {number} is not an object with “role” and “content”")
    role = message.get("role")
    if role not in ROLES:
        raise DataError(
            f"message {number} has the role {str(role)[:40]!r}; known are {', '.join(ROLES)}"
        )
    return Turn(str(role), _string(message, "content"))


def _labelled(document: Mapping[str, Any]) -> LabelledSample | None:
    text, label = _string(document, "text"), document.get("label")
    if isinstance(label, int) and not isinstance(label, bool):
        label = str(label)
    if not isinstance(label, str) or not label.strip():
        problem = "missing" if "label" not in document else json.dumps(label)[:40]
        raise DataError(f"“label” is {problem}; it must be a non-empty string or an integer")
    if len(label) > MAX_LABEL_CHARACTERS:
        raise DataError(
            f"“label” has {len(label)} characters, and the most is {MAX_LABEL_CHARACTERS}; name "
            "the class in fewer"
        )
    return LabelledSample(text, storable(label.strip(), "label")) if text.strip() else None


_READERS = {
    "text": _text,
    "classification": _labelled,
    "completion": _completion,
    "instruction": _instruction,
    "chat": _chat,
}


# Validates a training data file before training.


FIRST_SAMPLES = 3
MAX_ERRORS = 5
EXCERPT_CHARACTERS = 300


class Part(NamedTuple):
    """A part of a sample for display: its role and the beginning of its text."""

    who: str
    text: str


class FileSummary(NamedTuple):
    """The content of a file; with errors it cannot be trained on."""

    format: Format | None
    num_records: int
    num_empty: int
    samples: tuple[tuple[Part, ...], ...]  # the first few
    errors: tuple[str, ...]  # the first few


def check_file(file: BinaryIO, name: str, stated: Format | None = None) -> FileSummary:
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
    return FileSummary(reader.format, count, reader.num_empty, tuple(samples), tuple(errors))


def too_few(name: str, count: int) -> str:
    """Return the error of a file with fewer than two different records."""
    content = (
        "no record" if not count else "only one record" if count == 1 else "one record, again"
    )
    return f"{name} holds {content}; give at least two that differ: one is held out for evaluation"


def _samples(reader: Reader, file: BinaryIO, errors: list[str]) -> Iterator[Sample]:
    """Yield the readable samples; collect at most ``MAX_ERRORS`` errors."""
    for line, raw in reader.raw_records(file):
        try:
            sample = reader.sample(line, raw)
        except DataError as error:
            errors.append(str(error))
            if len(errors) >= MAX_ERRORS:
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
