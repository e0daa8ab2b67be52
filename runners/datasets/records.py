"""Reads and validates the records of a training file."""

import codecs
import csv
import hashlib
import io
import itertools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, NamedTuple, get_args

from runners.datasets.conversations import (
    NOTHING,
    REFUSED,
    ChatSample,
    DataError,
    Turn,
    read_conversation,
    string_of,
    system_turns,
    with_messages,
)
from runners.datasets.parquet_process import UnreadableTableError, rows_in_subprocess
from runners.datasets.preferences import (
    REWARD_COLUMNS,
    Passage,
    PreferenceSample,
    PromptSample,
    RatedSample,
    is_preference,
    is_prompt,
    is_rated,
    read_preference,
    read_prompt,
    read_rated,
    text_of,
)
from runners.datasets.text import (
    LongLineError,
    TextError,
    read_json,
    read_lines,
    read_text,
    storable,
)

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".txt")
Format = Literal[
    "text",
    "chat",
    "sharegpt",
    "instruction",
    "completion",
    "classification",
    "preference",
    "kto",
    "prompt",
]
FORMATS: tuple[Format, ...] = get_args(Format)
FIELDS: Mapping[Format, tuple[str, ...]] = {  # in the order of detection
    "preference": ("chosen", "rejected"),
    "kto": ("prompt", "completion", "label"),
    "chat": ("messages",),
    "sharegpt": ("conversations",),
    "instruction": ("instruction", "output"),
    "completion": ("prompt", "completion"),
    "classification": ("text", "label"),
    "text": ("text",),
    "prompt": ("prompt",),
}
READ_FIELDS: Mapping[Format, tuple[str, ...]] = {  # what a record of the format may hold besides
    "preference": ("prompt", "system", "weight"),
    "kto": ("system", "weight"),
    "chat": ("system", "tools", "weight"),
    "sharegpt": ("system", "tools", "weight"),
    "instruction": ("input", "system", "history", "weight"),
    "completion": ("weight",),
    "classification": ("weight",),
    "text": ("weight",),
    "prompt": ("system", "weight", *REWARD_COLUMNS),
}
OTHER_SUFFIXES = {  # of public data sets, and the way out
    ".tsv": "save it as .csv or Parquet",
    ".arrow": "save it as Parquet",
    ".md": "a data set of the Hub is in the files below data/",
    **dict.fromkeys((".gz", ".zst", ".xz", ".zip"), "unpack it first"),
}
PART_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.\w+$")  # as the Hub divides data sets
MAX_FOLDER_FILES, SHOWN_FILES = 4096, 3
MAX_LINE_BYTES = 4 * 1024**2
MAX_RECORDS = 2_000_000
MAX_DOCUMENT_CHARACTERS = 1024**2  # of a .txt file: a longer document is split
MIN_DOCUMENT_CHARACTERS = 2000  # paragraphs of a .txt file are joined up to this size
SHOWN_CHARACTERS = 80
MAX_LABEL_CHARACTERS = 100
OTHER_CHAT = "write the turns as “messages”, each with its “role” and “content”"
ONE_OBJECT = "write one object per line: jq -c '.[]' FILE.json > FILE.jsonl"
READ = frozenset().union(*FIELDS.values(), *READ_FIELDS.values())
MOST_COLUMNS = 1000
LIST_PIECE = 1024**2  # characters of a list that are read at a time
csv.field_size_limit(MAX_LINE_BYTES)


class TextSample(NamedTuple):
    """Text; every token is trained on."""

    text: str


class CompletionSample(NamedTuple):
    """A prompt and a completion; only the completion is trained on."""

    prompt: str
    completion: str


class LabelledSample(NamedTuple):
    """Text with its class label; next-token training uses the text alone."""

    text: str
    label: str


Sample = (
    TextSample
    | CompletionSample
    | ChatSample
    | LabelledSample
    | PreferenceSample
    | RatedSample
    | PromptSample
)
COMPARED: frozenset[Format] = frozenset(
    {"preference", "kto", "prompt"}
)  # that a next token is not learnt from


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
        way_out = f"; {OTHER_SUFFIXES[suffix]}" if suffix in OTHER_SUFFIXES else ""
        raise DataError(
            f"{name}: files of training data end in {', '.join(SUFFIXES[:-1])} or "
            f"{SUFFIXES[-1]}, not {suffix or 'in nothing'!r}{way_out}"
        )
    return suffix


def part_words(name: str) -> str:
    """Return the sentence about a file that is one of a data set's parts, or nothing."""
    match = PART_NAME.search(name)
    if match is None or int(match[2]) == 1:
        return ""
    return (
        f"{name} is part {int(match[1]) + 1} of {int(match[2])} of its data set; the others are "
        "read only as sources of their own"
    )


def files_in(folder: Path) -> str:
    """Return the sentence about the files of training data in a folder, such as the Hub's."""
    paths = sorted(each for each in islice(folder.rglob("*"), MAX_FOLDER_FILES) if each.is_file())
    names = [
        each.relative_to(folder).as_posix() for each in paths if each.suffix.lower() in SUFFIXES
    ]
    if not names:
        return f"it holds no {', '.join(SUFFIXES)} file; give a path to one"
    more = f" and {len(names) - SHOWN_FILES} more" if len(names) > SHOWN_FILES else ""
    listed = ", ".join(names[:SHOWN_FILES]) + more
    return f"give one of its files, or several as sources by weight: {listed}"


def digest_of(sample: Sample) -> bytes:
    """Return the SHA-256 of a sample's content."""
    content: object = sample
    if isinstance(sample, ChatSample):  # of plain turns the same as ever: it decides the held-out
        turns = [turn[:2] if turn == Turn(*turn[:2]) else turn for turn in sample.turns]
        content = [turns, sample.tools] if sample.tools else [turns]
    return hashlib.sha256(json.dumps(content).encode()).digest()


def num_characters(sample: Sample) -> int:
    """Return the length of a sample in characters."""
    if isinstance(sample, ChatSample):
        return len(sample.tools) + sum(len(each.content + each.more) for each in sample.turns)
    if isinstance(sample, PreferenceSample | RatedSample | PromptSample):
        return sum(len(text_of(each)) for each in passages_of(sample).values())
    return sum(map(len, sample))


def passages_of(sample: PreferenceSample | RatedSample | PromptSample) -> dict[str, Passage]:
    """Return the prompt and answers of a comparison by their fields' names."""
    fields = sample._asdict().items()
    return {name: each for name, each in fields if isinstance(each, str | tuple)}


class Reader:
    """Reads and validates the records of one file."""

    def __init__(
        self,
        name: str,
        stated: Format | None = None,
        columns: Mapping[str, str] | None = None,
    ) -> None:
        """Create a reader for a file name; the first record determines an unstated format.

        ``columns``: the field that each column is read as, which are then the only ones; a text
        has none.

        Raises:
            DataError: the file type is not supported.
        """
        self.name = name
        self.suffix = suffix_of(name)
        self.format: Format | None = "text" if self.suffix == ".txt" else stated
        self.num_empty = 0
        self.left_out: Counter[str] = Counter()  # records by the field of them that is not read
        self._unread_columns: tuple[str, ...] = ()
        self._columns = dict(columns or {})
        self._has_columns = False  # seen in a record
        if self.suffix == ".txt" and self._columns:
            raise DataError(f"{name}: a .txt file has no columns; leave out {self._named}")
        if self.suffix == ".txt" and stated not in {None, "text"}:
            raise DataError(
                f"{name}: a .txt file is plain text; {stated} needs JSON lines or Parquet"
            )

    def records(self, file: BinaryIO) -> Iterator[Record]:
        """Yield the records with something to learn; ``num_empty`` counts the others.

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
        elif self.suffix == ".csv":
            yield from self._cells(file)
        elif self.suffix == ".json" and _is_list(file):
            yield from self._entries(file)
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
        try:
            for number, line in read_lines(file, MAX_LINE_BYTES):
                if line.strip():
                    yield number, line
                elif self.suffix == ".txt":
                    yield number, b""
        except LongLineError as error:
            raise self._too_long(error.line) from None

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
        read = sorted(self._columns or READ)
        rows = rows_in_subprocess(file, read, MAX_LINE_BYTES, self._skip_columns)
        try:
            for number, line in rows:
                if len(line) > MAX_LINE_BYTES:
                    raise self._too_long(number)
                yield number, line
        except UnreadableTableError as error:
            raise DataError(f"{self.name}: {error}") from None

    def _cells(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Yield the rows of a table of comma-separated values, as JSON by its first line."""
        number = size = 0

        def lines() -> Iterator[str]:
            nonlocal size
            while line := text.readline(MAX_LINE_BYTES + 1):
                size += len(line)
                if size > MAX_LINE_BYTES:
                    raise self._too_long(number + 1)
                yield line

        try:
            with _as_text(file) as text:
                rows = csv.reader(lines(), strict=True)
                names = next(rows, [])
                self._check_columns(names)
                for number, cells in enumerate(rows, 1):
                    size = 0
                    if len(cells) > len(names):
                        raise self._error(
                            number, f"it has more than {len(names)} values", ",".join(cells)
                        )
                    if not cells:
                        continue
                    row = dict(itertools.zip_longest(names, cells, fillvalue=""))
                    read = {k: v for k, v in row.items() if k in (self._columns or READ)}
                    yield number, json.dumps(read).encode()
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(
                f"{self.name}: the row after {number} is no comma-separated values: {error}"
            ) from None

    def _check_columns(self, names: Sequence[str]) -> None:
        """Refuse a table's first line, and note its columns that are not read."""
        if len(names) > MOST_COLUMNS:
            raise DataError(
                f"{self.name}: its first line has {len(names)} columns; {MOST_COLUMNS} at most"
            )
        if len(set(names)) < len(names):
            raise DataError(f"{self.name}: its first line names a column twice; keep one")
        self._skip_columns([name for name in names if name not in (self._columns or READ)])

    def _entries(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Yield the entries of a JSON list, a piece of which is read at a time."""
        decoder, number, at, wants_value = json.JSONDecoder(), 0, 0, True
        try:
            with _as_text(file) as source:
                text = source.read(LIST_PIECE).lstrip()[1:]
                while True:
                    at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
                    if text.startswith("]", at) and not (wants_value and number):
                        break
                    if at < len(text) and not wants_value:
                        if text[at] != ",":
                            raise self._error(
                                number + 1, "a comma is missing before it", text[at:]
                            )
                        at, wants_value = at + 1, True
                        continue
                    end = _end_of_value(decoder, text, at)
                    if end > at:
                        number, wants_value = number + 1, False
                        yield number, text[at:end].encode()
                        at = end
                        continue
                    piece = source.read(LIST_PIECE)
                    if len(text) - at > MAX_LINE_BYTES or not piece:
                        most = f"longer than {MAX_LINE_BYTES // 1024**2} MiB"
                        reason = f"it is no JSON, or {most}, or the list has no end"
                        raise self._error(number + 1, reason, text[at:])
                    text, at = text[at:] + piece, 0
                if rest := text[at + 1 :].strip() or source.read(LIST_PIECE).strip():
                    raise self._error(number + 1, "something follows the list", rest)
        except UnicodeDecodeError as error:
            raise self._error(number + 1, f"it is not valid UTF-8 ({error.reason})", "") from None

    def _skip_columns(self, names: Collection[str]) -> None:
        for name in names:
            if name in REFUSED and not self._columns:
                raise DataError(f"{self.name}: column “{name}”: {REFUSED[name]}")
        self._unread_columns = tuple(names)

    def _too_long(self, number: int) -> DataError:
        return DataError(
            f"{self.name}: {self._record_noun} {number} is longer than "
            f"{MAX_LINE_BYTES // 1024**2} MiB; divide it into several records"
        )

    @property
    def _record_noun(self) -> str:
        return {".parquet": "row", ".csv": "row", ".json": "record"}.get(self.suffix, "line")

    def _text(self, line: int, raw: bytes) -> str:
        try:
            text = read_text(raw)
        except TextError as error:
            raise self._error(line, str(error), raw) from None
        if "\0" in text:
            raise self._error(line, "it holds a null character; remove it", raw)
        return text

    # JSON

    def _parsed(self, line: int, text: str) -> Sample | None:
        try:
            document = read_json(text)
        except TextError as error:
            is_begun = text.strip() == "{" or text.startswith("[")  # a document of several lines
            reason = f"it is no JSON object of one line; {ONE_OBJECT}" if is_begun else str(error)
            raise self._error(line, reason, text) from None
        if not isinstance(document, dict):
            raise self._error(line, f"it is not a JSON object; {ONE_OBJECT}", text)
        left_out: set[str] = set(self._unread_columns)
        if self._columns:
            document = self._chosen(line, document, text, left_out)
        if self.format is None:
            self.format = self._format_of(line, document, text)
        if self.suffix == ".parquet":
            document = {name: _without_nulls(value) for name, value in document.items()}
        try:
            _refuse_rating(document, self.format)
            if self.format == "chat":
                document = with_messages(document)
            _refuse(document, self.format, left_out)
            sample = _READERS[self.format](document, left_out)
        except (DataError, TextError) as error:
            raise self._error(line, str(error), text) from None
        if sample is not None:
            self.left_out.update(left_out)
        return sample

    def _chosen(
        self, line: int, document: Mapping[str, Any], text: str, left_out: set[str]
    ) -> dict[str, Any]:
        """Return the fields of a record that its chosen columns are read as.

        A column may be absent from a record, but not from the first one.
        """
        is_table = bool(self._unread_columns) and not self._columns.keys() & document.keys()
        missing = [name for name in self._columns if name not in document]
        if missing and not self._has_columns:
            has = sorted({*map(str, document), *self._unread_columns}) or ["none"]
            raise self._error(
                line,
                f"it has no column “{missing[0]}”, and {self._named} are read; its columns are "
                f"{', '.join(has)[:200]}",
                "" if is_table else text,
            )
        self._has_columns = True
        left_out.update(map(str, document.keys() - self._columns.keys()))
        return {field: document[name] for name, field in self._columns.items() if name in document}

    @property
    def _named(self) -> str:
        named = (
            f"{name}={field}" if name != field else name for name, field in self._columns.items()
        )
        return f"the columns {', '.join(named)}"

    def _format_of(self, line: int, document: Mapping[str, Any], text: str) -> Format:
        for each, fields in FIELDS.items():
            is_certain = _CERTAIN.get(each)
            has_fields = all(field in document for field in fields)
            if has_fields and (is_certain is None or is_certain(document)):
                is_chat = each == "completion" and isinstance(document["completion"], list)
                return "chat" if is_chat else each
        for name, way_out in (REFUSED | {"conversation": OTHER_CHAT}).items():
            is_column = self.suffix == ".parquet" and name in document  # its values are not read
            if is_column or document.get(name) not in NOTHING:
                raise self._error(line, f"“{name}”: {way_out}", text)
        names = {*map(str, document), *self._unread_columns}
        fields_present = ", ".join(sorted(names)[:8]) or "none"
        raise self._error(line, f"{_wanted()}; its fields are {fields_present[:200]}", text)

    def _error(self, line: int, reason: str, raw: bytes | str) -> DataError:
        text = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
        shown = json.dumps(text.strip()[:SHOWN_CHARACTERS], ensure_ascii=False)
        return DataError(f"{self.name}: {self._record_noun} {line}: {reason}. It begins {shown}")


_SPACE = re.compile(r"\s*")


@contextmanager
def _as_text(file: BinaryIO) -> Iterator[io.TextIOWrapper]:
    """Give the text of a file, which stays open."""
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")
    try:
        yield text
    finally:
        text.detach()


def _is_list(file: BinaryIO) -> bool:
    """Return whether a file of JSON holds one list, by its first character."""
    begin = file.read(LIST_PIECE).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    file.seek(0)
    return begin == b"["


def _end_of_value(decoder: json.JSONDecoder, text: str, at: int) -> int:
    """Return where a JSON value ends; where it begins if its end is not there yet."""
    try:
        _, end = decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        return at
    return end if end < len(text) else at  # a number may go on


def _wanted() -> str:
    listed = "; ".join(f"{each}: {', '.join(fields)}" for each, fields in FIELDS.items())
    return f"it has the fields of no known format; rename them to those of one ({listed})"


def _without_nulls(value: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return a table's value without null fields: each struct has those of all rows."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _refuse_rating(document: Mapping[str, Any], form: Format) -> None:
    """Refuse a rated answer in a format that would learn it as a good one.

    Raises:
        DataError: “label” is true or false beside a completion.
    """
    if form != "kto" and isinstance(document.get("label"), bool) and "completion" in document:
        raise DataError(
            "“label” rates the completion by true or false, which the format kto learns from; "
            f"choose it, or leave “label” out to learn every answer as {form}"
        )


def _refuse(document: Mapping[str, Any], form: Format, left_out: set[str]) -> None:
    """Refuse a record whose unread fields change what is learnt; note its other unread ones.

    Raises:
        DataError: the record has such a field, or a weight that is not 1.
    """
    read = {*FIELDS[form], *READ_FIELDS[form]}
    for name, value in document.items():
        if name in read or value in NOTHING:
            continue
        if name in REFUSED:
            raise DataError(f"“{name}”: {REFUSED[name]}")
        left_out.add(name)
    if (weight := document.get("weight", 1)) not in (None, 1):
        raise DataError(
            f"“weight” of a record is {json.dumps(weight)[:40]}, and every record has weight 1; "
            "leave out a record of weight 0, and repeat one of more"
        )


def _text(document: Mapping[str, Any], _left_out: set[str]) -> TextSample | None:
    text = string_of(document, "text")
    return TextSample(text) if text.strip() else None


def _completion(document: Mapping[str, Any], _left_out: set[str]) -> CompletionSample | None:
    prompt, completion = string_of(document, "prompt"), string_of(document, "completion")
    return CompletionSample(prompt, completion) if completion.strip() else None


def _instruction(document: Mapping[str, Any], _left_out: set[str]) -> ChatSample | None:
    parts = [string_of(document, "instruction"), string_of(document, "input", is_needed=False)]
    answer = string_of(document, "output")
    turns = [*system_turns(document), *_history(document)]
    if not answer.strip():
        return None
    prompt = "\n\n".join(part for part in parts if part.strip())
    return ChatSample((*turns, Turn("user", prompt), Turn("assistant", answer)))


def _history(document: Mapping[str, Any]) -> Iterator[Turn]:
    """Yield the earlier turns of an instruction: its pairs of a question and its answer."""
    history = document.get("history") or []
    if not isinstance(history, list):
        raise DataError("“history” is not a list of pairs of a question and its answer")
    for number, pair in enumerate(history, 1):
        if not isinstance(pair, list) or [type(each) for each in pair] != [str, str]:
            raise DataError(f"“history” {number} is not a pair of a question and its answer")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            yield Turn(role, storable(text, f"history {number}"))


def _labelled(document: Mapping[str, Any], _left_out: set[str]) -> LabelledSample | None:
    text, label = string_of(document, "text"), document.get("label")
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
    label = unicodedata.normalize("NFC", storable(label.strip(), "label"))  # else two classes
    return LabelledSample(text, label) if text.strip() else None


# Fields alone do not tell these: a null, or a class beside a completion.
_CERTAIN: Mapping[Format, Callable[[Mapping[str, Any]], bool]] = {
    "preference": is_preference,
    "kto": is_rated,
    "prompt": is_prompt,
}
_READERS: Mapping[Format, Callable[[Mapping[str, Any], set[str]], Sample | None]] = {
    "preference": read_preference,
    "kto": read_rated,
    "prompt": read_prompt,
    "text": _text,
    "classification": _labelled,
    "completion": _completion,
    "instruction": _instruction,
    "chat": read_conversation,
    "sharegpt": partial(read_conversation, field="conversations"),
}


# Validates a training data file before training.


FIRST_SAMPLES = 3
MAX_ERRORS = 5
MAX_NAMED = 12  # fields that are left out
EXCERPT_CHARACTERS, MAX_PARTS = 300, 8


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
    left_out: Mapping[str, int]  # records by the field of them that is not read


def left_out_words(left_out: Mapping[str, int]) -> str:
    """Return the sentence about fields that are not read, or nothing if there is none."""
    most = sorted(left_out.items(), key=lambda item: (-item[1], item[0]))
    named = [f"“{name[:40]}” ({count:,})" for name, count in most[:MAX_NAMED]]
    others = [f"{len(most) - MAX_NAMED} more"] if len(most) > MAX_NAMED else []
    return f"fields that are left out, with their records: {', '.join(named + others)}" * bool(
        most
    )


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
    return FileSummary(
        reader.format,
        count,
        reader.num_empty,
        tuple(samples),
        tuple(errors),
        dict(reader.left_out),
    )


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
        tools = [Part("tools", sample.tools)] if sample.tools else []
        parts = [*tools, *(_part_of(turn) for turn in sample.turns)]
    elif isinstance(sample, PreferenceSample | RatedSample | PromptSample):
        parts = [Part(name, text_of(each)) for name, each in passages_of(sample).items()]
        if isinstance(sample, RatedSample):
            parts.append(Part("label", "wanted" if sample.label else "not wanted"))
    elif isinstance(sample, CompletionSample):
        parts = [Part("prompt", sample.prompt), Part("completion", sample.completion)]
    elif isinstance(sample, LabelledSample):
        parts = [Part("text", sample.text), Part("label", sample.label)]
    else:
        parts = [Part("text", sample.text)]
    if len(parts) > MAX_PARTS:
        others = len(parts) - MAX_PARTS + 1
        parts = [*parts[: MAX_PARTS - 1], Part("more", f"{others} more messages")]
    return tuple(Part(each.who, _beginning(each.text)) for each in parts)


def _beginning(text: str) -> str:
    """Return the beginning of a text; an ellipsis says that it goes on."""
    return text if len(text) <= EXCERPT_CHARACTERS else f"{text[:EXCERPT_CHARACTERS]}…"


def _part_of(turn: Turn) -> Part:
    who = turn.role if turn.is_learnt else f"{turn.role}, not learnt"
    return Part(who, " ".join(filter(None, (turn.content, turn.more))))
