"""Reads and validates the records of a training file."""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Literal, NamedTuple, get_args

from runners.datasets.parquet_process import UnreadableTableError, rows_in_subprocess
from runners.datasets.text import (
    LongLineError,
    TextError,
    read_json,
    read_lines,
    read_text,
    storable,
)

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
READ_FIELDS: Mapping[Format, tuple[str, ...]] = {  # what a record of the format may hold besides
    "chat": ("system", "tools", "weight"),
    "instruction": ("input", "system", "history", "weight"),
    "completion": ("weight",),
    "classification": ("weight",),
    "text": ("weight",),
}
ROLES = ("system", "user", "assistant", "tool")
READ_OF_MESSAGE = frozenset(
    {"role", "content", "tool_calls", "weight", "train", "training", "loss"}
)
PASSED_ON = ("name", "tool_call_id", "reasoning_content", "thinking")  # to the chat template
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
REFUSED: dict[str, str] = {  # fields that change what is learnt, and the way out
    **dict.fromkeys(
        MEDIA, "jobs train on text only; remove the field, or the records that need it"
    ),
    "functions": "write the functions as “tools”",
    "function_call": "write the call as “tool_calls”",
    "chosen": "no job trains on preferences; write the chosen answer as the only one",
    "rejected": "no job trains on preferences; write the chosen answer as the only one",
}
MAX_LINE_BYTES = 4 * 1024**2
MAX_RECORDS = 2_000_000
MAX_DOCUMENT_CHARACTERS = 1024**2  # of a .txt file: a longer document is split
MIN_DOCUMENT_CHARACTERS = 2000  # paragraphs of a .txt file are joined up to this size
SHOWN_CHARACTERS = 80
MAX_LABEL_CHARACTERS = 100
OTHER_CHAT = "write the turns as “messages”, each with its “role” and “content”"
NOTHING: tuple[object, ...] = (None, "", [], {})  # values of a field that change nothing


class DataError(ValueError):
    """A file or record is invalid; the text gives the reason."""


class Turn(NamedTuple):
    """One message of a conversation.

    ``more`` is a JSON object of its other fields for the chat template; the weight of an answer
    decides whether it is learnt.
    """

    role: str
    content: str
    more: str = ""
    is_learnt: bool = True

    def message(self) -> dict[str, Any]:
        """Return the message as chat templates take it."""
        return {"role": self.role, "content": self.content, **json.loads(self.more or "{}")}


class TextSample(NamedTuple):
    """Text; every token is trained on."""

    text: str


class CompletionSample(NamedTuple):
    """A prompt and a completion; only the completion is trained on."""

    prompt: str
    completion: str


class ChatSample(NamedTuple):
    """A conversation; only the assistant's turns are trained on. ``tools`` is a JSON list."""

    turns: tuple[Turn, ...]
    tools: str = ""


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
    content: object = sample
    if isinstance(sample, ChatSample):  # of plain turns the same as ever: it decides the held-out
        turns = [turn[:2] if turn == Turn(*turn[:2]) else turn for turn in sample.turns]
        content = [turns, sample.tools] if sample.tools else [turns]
    return hashlib.sha256(json.dumps(content).encode()).digest()


def num_characters(sample: Sample) -> int:
    """Return the length of a sample in characters."""
    if isinstance(sample, ChatSample):
        return len(sample.tools) + sum(len(each.content + each.more) for each in sample.turns)
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
        self.left_out: Counter[str] = Counter()  # records by the field of them that is not read
        self._unread_columns: tuple[str, ...] = ()
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
        fields = set().union(*FIELDS.values(), *READ_FIELDS.values())
        rows = rows_in_subprocess(file, sorted(fields), MAX_LINE_BYTES, self._skip_columns)
        try:
            for number, line in rows:
                if len(line) > MAX_LINE_BYTES:
                    raise self._too_long(number)
                yield number, line
        except UnreadableTableError as error:
            raise DataError(f"{self.name}: {error}") from None

    def _skip_columns(self, names: Collection[str]) -> None:
        for name in names:
            if name in REFUSED:
                raise DataError(f"{self.name}: column “{name}”: {REFUSED[name]}")
        self._unread_columns = tuple(names)

    def _too_long(self, number: int) -> DataError:
        return DataError(
            f"{self.name}: {self._record_noun} {number} is longer than "
            f"{MAX_LINE_BYTES // 1024**2} MiB; divide it into several records"
        )

    @property
    def _record_noun(self) -> str:
        return "row" if self.suffix == ".parquet" else "line"

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
            raise self._error(line, str(error), text) from None
        if not isinstance(document, dict):
            raise self._error(line, "it is not a JSON object; write one object per line", text)
        if self.format is None:
            self.format = self._format_of(line, document, text)
        if self.suffix == ".parquet":
            document = {name: _without_nulls(value) for name, value in document.items()}
        left_out: set[str] = set(self._unread_columns)
        try:
            _refuse(document, self.format, left_out)
            sample = _READERS[self.format](document, left_out)
        except (DataError, TextError) as error:
            raise self._error(line, str(error), text) from None
        if sample is not None:
            self.left_out.update(left_out)
        return sample

    def _format_of(self, line: int, document: Mapping[str, Any], text: str) -> Format:
        for each, fields in FIELDS.items():
            if all(field in document for field in fields):
                return each
        for name, way_out in (REFUSED | {"conversations": OTHER_CHAT}).items():
            if document.get(name) not in NOTHING:
                raise self._error(line, f"“{name}”: {way_out}", text)
        names = {*map(str, document), *self._unread_columns}
        fields_present = ", ".join(sorted(names)[:8]) or "none"
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


def _without_nulls(value: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return a table's value without null fields: each struct has those of all rows."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


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
    if form == "completion" and isinstance(document.get("label"), bool):
        raise DataError(
            "“label” says whether the completion is wanted, and no job trains on preferences; "
            "leave out the records whose label is false, and the field"
        )
    if (weight := document.get("weight", 1)) not in (None, 1):
        raise DataError(
            f"“weight” of a record is {json.dumps(weight)[:40]}, and every record has weight 1; "
            "leave out a record of weight 0, and repeat one of more"
        )


def _text(document: Mapping[str, Any], _left_out: set[str]) -> TextSample | None:
    text = _string(document, "text")
    return TextSample(text) if text.strip() else None


def _completion(document: Mapping[str, Any], _left_out: set[str]) -> CompletionSample | None:
    prompt, completion = _string(document, "prompt"), _string(document, "completion")
    return CompletionSample(prompt, completion) if completion.strip() else None


def _instruction(document: Mapping[str, Any], _left_out: set[str]) -> ChatSample | None:
    parts = [_string(document, "instruction"), _string(document, "input", is_needed=False)]
    answer = _string(document, "output")
    turns = [*_system(document), *_history(document)]
    if not answer.strip():
        return None
    prompt = "\n\n".join(part for part in parts if part.strip())
    return ChatSample((*turns, Turn("user", prompt), Turn("assistant", answer)))


def _system(document: Mapping[str, Any]) -> list[Turn]:
    text = _string(document, "system", is_needed=False)
    return [Turn("system", text)] if text.strip() else []


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


def _chat(document: Mapping[str, Any], left_out: set[str]) -> ChatSample | None:
    messages = document.get("messages")
    if not isinstance(messages, list):
        raise DataError("“messages” is not a list of messages with “role” and “content”")
    turns = [_turn(number, each, left_out) for number, each in enumerate(messages, 1)]
    if not turns:
        return None
    if not any(turn.role == "assistant" for turn in turns):
        raise DataError("no message has the role “assistant”, and only those have a loss; add one")
    if system := _system(document):
        if any(turn.role == "system" for turn in turns):
            raise DataError("“system” stands beside a message of that role; keep one of them")
        turns = [*system, *turns]
    if not any(turn.role == "assistant" and turn.is_learnt for turn in turns):
        return None
    return ChatSample(tuple(turns), _tools(document))


def _tools(document: Mapping[str, Any]) -> str:
    """Return the JSON list of a record's tools; some files hold it as a text."""
    tools = document.get("tools")
    if tools in NOTHING:
        return ""
    if isinstance(tools, str):
        tools = read_json(tools)
    if not isinstance(tools, list) or not all(map(_tool_name, tools)):
        raise DataError('“tools” is not a list of {"type": "function", "function": {"name": …}}')
    return storable(json.dumps(tools, ensure_ascii=False), "tools")


def _tool_name(tool: object) -> str:
    """Return the name of a tool or call, or nothing for what is none."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else ""


def _turn(number: int, message: object, left_out: set[str]) -> Turn:
    if not isinstance(message, dict):
        raise DataError(f"message {number} is not an object with “role” and “content”")
    role = message.get("role")
    if role not in ROLES:
        raise DataError(
            f"message {number} has the role {str(role)[:40]!r}; known are {', '.join(ROLES)}"
        )
    for name, value in message.items():
        if name not in READ_OF_MESSAGE and name not in PASSED_ON and value not in NOTHING:
            if name in REFUSED:
                raise DataError(f"message {number}: “{name}”: {REFUSED[name]}")
            left_out.add(f"messages.{name}")
    more = {name: message[name] for name in PASSED_ON if message.get(name) not in NOTHING}
    for name, value in more.items():
        if not isinstance(value, str):
            raise DataError(f"message {number}: “{name}” is not text but {type(value).__name__}")
    if calls := _tool_calls(number, str(role), message):
        more["tool_calls"] = calls
    content = _content(number, message, is_needed=not calls)
    is_learnt = _is_learnt(number, message)
    if role == "assistant" and not content.strip() and not calls:
        is_learnt = False  # nobody wants to teach silence
    text = storable(json.dumps(more, ensure_ascii=False), f"message {number}") if more else ""
    return Turn(str(role), content, text, is_learnt or role != "assistant")


def _content(number: int, message: dict[str, Any], *, is_needed: bool) -> str:
    """Return a message's text; the texts of a list of parts are joined."""
    content = message.get("content")
    if not isinstance(content, list):
        return _string(message, "content", is_needed=is_needed)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise DataError(
                f"message {number} has a part of the type {str(kind)[:40]!r}; {REFUSED['image']}"
            )
        texts.append(storable(part["text"], "content"))
    return "".join(texts)


def _tool_calls(number: int, role: str, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a message's tool calls, their arguments as the objects that templates take."""
    calls = message.get("tool_calls")
    if calls in NOTHING:
        return []
    if role != "assistant" or not isinstance(calls, list) or not all(map(_tool_name, calls)):
        raise DataError(
            f"message {number}: “tool_calls” is not a list in an assistant message of "
            '{"type": "function", "function": {"name": …, "arguments": …}}'
        )
    return [_tool_call(number, call) for call in calls]


def _tool_call(number: int, call: dict[str, Any]) -> dict[str, Any]:
    inner = dict(call.get("function", call))
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        arguments = read_json(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict | None):
        raise DataError(f"message {number}: “arguments” of a tool call is not a JSON object")
    return {"type": "function", **call, "function": {**inner, "arguments": arguments or {}}}


def _is_learnt(number: int, message: dict[str, Any]) -> bool:
    """Return whether a message's weight, or the mark of other trainers, says that it is learnt."""
    is_learnt = True
    for name in ("weight", "train", "training", "loss"):
        value = message.get(name)
        if value not in (None, 0, 1):
            raise DataError(
                f"message {number}: “{name}” is {json.dumps(value)[:40]}; it can be 0 or 1"
            )
        is_learnt = is_learnt and value != 0
    return is_learnt


def _labelled(document: Mapping[str, Any], _left_out: set[str]) -> LabelledSample | None:
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
MAX_NAMED = 12  # fields that are left out
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
    elif isinstance(sample, CompletionSample):
        parts = [Part("prompt", sample.prompt), Part("completion", sample.completion)]
    elif isinstance(sample, LabelledSample):
        parts = [Part("text", sample.text), Part("label", sample.label)]
    else:
        parts = [Part("text", sample.text)]
    return tuple(Part(each.who, each.text[:EXCERPT_CHARACTERS]) for each in parts[:8])


def _part_of(turn: Turn) -> Part:
    who = turn.role if turn.is_learnt else f"{turn.role}, not learnt"
    return Part(who, " ".join(filter(None, (turn.content, turn.more))))
