"""Reads text, lines and JSON of people's files: one reader for all that takes them.

Text is UTF-8; a byte order mark is no content, wherever a program or a joined file leaves it.
Lines end as any system ends them (LF, CR LF or CR), and nowhere else: JSON may hold U+2028, a form
feed or U+0085 within a line.
"""

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

MARK = "\ufeff"
_OTHER_MARKS = {  # longer ones first: that of UTF-32 begins with that of UTF-16
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


class TextError(ValueError):
    """Bytes are no text, or a text is no JSON; ``line`` and ``column`` say where, from 1."""

    def __init__(self, message: str, line: int = 0, column: int = 0) -> None:
        super().__init__(message)
        self.line = line
        self.column = column


class LongLineError(ValueError):
    """A line is longer than its limit."""

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line} is too long")
        self.line = line


def read_text(data: bytes) -> str:
    """Return the text of UTF-8 bytes, without a byte order mark.

    Raises:
        TextError: the bytes are in another encoding; the sentence names it where it is known.
    """
    for mark, encoding in _OTHER_MARKS.items():
        if data.startswith(mark):
            raise TextError(f"it is {encoding} and not valid UTF-8; save the file as UTF-8")
    try:
        return data.decode().removeprefix(MARK)
    except UnicodeDecodeError as error:
        raise TextError(
            f"byte {error.start + 1} is not valid UTF-8; save the file as UTF-8"
        ) from None


def read_json(text: str, **hooks: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return the value of a JSON text; ``hooks`` are those of ``json.loads``.

    Raises:
        TextError: the text is not valid JSON.
    """
    try:
        return json.loads(text.removeprefix(MARK), **hooks)
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")
        raise TextError(f"it is not valid JSON ({reason})", error.lineno, error.colno) from None
    except RecursionError:
        raise TextError("it is not valid JSON (it is nested too deep)") from None
    except ValueError as error:  # a number of thousands of digits
        raise TextError(f"it is not valid JSON ({error})") from None


def read_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield each line's number, counted from 1, and its bytes with its end.

    Raises:
        LongLineError: a line is longer than ``max_bytes``.
    """
    number, rest = 0, b""
    while read := file.readline(max_bytes + 1):
        is_cut = len(read) > max_bytes and not read.endswith(b"\n")
        lines = (rest + read).splitlines(keepends=True)
        rest = lines.pop() if is_cut else b""  # with CR alone, lines end before a line feed
        for line in lines:
            number += 1
            if len(line) > max_bytes:
                raise LongLineError(number)
            yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if len(rest) > max_bytes:
            raise LongLineError(number + 1)
    if rest:
        yield number + 1, rest


def unix_lines(text: str) -> str:
    """Return a text with line feeds as the ends of its lines; browsers send CR LF."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def storable(text: str, name: str) -> str:
    """Return the text if every tokenizer and database accepts it.

    Raises:
        TextError: the text has a null character or half of a surrogate pair.
    """
    if "\0" in text:
        raise TextError(f"“{name}” holds a null character; remove it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TextError(
            f"“{name}” holds half of a surrogate pair at character {error.start + 1}; write the "
            "whole character"
        ) from None
    return text
