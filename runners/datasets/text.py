"""Reads text, lines and JSON of people's files: one reader for all that takes them.

Text is UTF-8; a byte order mark is no content, wherever a program or a joined file leaves it.
Lines end as any system ends them (LF, CR LF or CR), and nowhere else: JSON may hold U+2028, a form
feed or U+0085 within a line.
"""

import codecs
import json
import math
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn

MARK = "\ufeff"
MAX_DEPTH = 100  # of lists and objects; what walks a value calls itself for each
MAX_CONFIG_DEPTH = 20  # of a model's config.json and its other small files
SHOWN_DIGITS = 18
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

    def of_file(self, name: str) -> str:
        """Return the message with a file's name as its subject."""
        message = str(self)
        rest = message.removeprefix("it ")
        return f"{name} {rest}" if rest != message else f"{name}: {message}"


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


# JSON. What its standard leaves open, or Python takes beyond it, is decided here for every reader:
# a key that stands twice in an object, NaN and infinity, numbers of thousands of digits, depth,
# and text that neither tokenizers nor databases take.


_KEY_OR_BRACKET = re.compile(r'("[^"\\]*(?:\\.[^"\\]*)*")\s*:|"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]')
_UNSTORABLE_ESCAPE = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")


class _RepeatedKeyError(Exception):
    """An object has a key twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _RepeatedKeyError
    return found


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)


def _refuse_number(text: str) -> NoReturn:
    raise TextError(
        f"it holds the number {text[:SHOWN_DIGITS]}, which is not finite; write a finite number, "
        "or null"
    )


_STRICT: dict[str, Any] = {
    "object_pairs_hook": _object,
    "parse_float": _finite,
    "parse_constant": _refuse_number,
}
_DECODER = json.JSONDecoder(**_STRICT)
_LENIENT_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def read_json(
    text: str,
    *,
    max_depth: int = MAX_DEPTH,
    max_digits: int | None = None,
    may_be_infinite: bool = False,
) -> Any:  # noqa: ANN401 (JSON)
    """Return the value of a JSON text.

    ``max_digits`` limits whole numbers. ``may_be_infinite``: infinity and NaN are numbers, as in
    the published configs of Mamba 2 (``"time_step_limit": [0.0, Infinity]``).

    Raises:
        TextError: the text is not valid JSON, has a key twice in one object, is nested deeper
            than ``max_depth``, or holds a number or a text that is not taken.
    """
    text = text.removeprefix(MARK)
    if text.count("[") + text.count("{") > max_depth:
        _check_depth(text, max_depth)
    try:
        value = _decoder(max_digits, may_be_infinite=may_be_infinite).decode(text)
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")
        raise TextError(f"it is not valid JSON ({reason})", error.lineno, error.colno) from None
    except _RepeatedKeyError:
        raise _repeated_key(text) from None
    except TextError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise TextError(f"it is not valid JSON ({error})") from None
    if _UNSTORABLE_ESCAPE.search(text) or not _is_unicode(text):
        _check_storable(value)
    return value


def _decoder(max_digits: int | None, *, may_be_infinite: bool) -> json.JSONDecoder:
    if max_digits is None:
        return _LENIENT_DECODER if may_be_infinite else _DECODER

    def whole(digits: str) -> int:
        if len(digits) > max_digits:
            raise TextError(
                f"it holds the number {digits[:SHOWN_DIGITS]}, which has {len(digits)} digits; "
                f"{max_digits} is the limit"
            )
        return int(digits)

    hooks = {"object_pairs_hook": _object} if may_be_infinite else _STRICT
    return json.JSONDecoder(**hooks, parse_int=whole)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as an escape in a request's own JSON
        return False
    return True


def _check_depth(text: str, max_depth: int) -> None:
    depth = deepest = 0
    for match in _KEY_OR_BRACKET.finditer(text):
        if match[0] in ("[", "{"):
            depth += 1
            deepest = max(deepest, depth)
        elif match[0] in ("]", "}"):
            depth -= 1
    if deepest > max_depth:
        raise TextError(f"it is nested {deepest} deep; {max_depth} is the limit")


def _repeated_key(text: str) -> TextError:
    """Return the error of the first key that stands twice in its object, with its place."""
    open_keys: list[set[str]] = []
    for match in _KEY_OR_BRACKET.finditer(text):
        if match[0] in ("[", "{"):
            open_keys.append(set())
        elif match[0] in ("]", "}"):
            open_keys.pop()
        elif match[1]:
            key = json.loads(match[1])
            if key in open_keys[-1]:
                line = text.count("\n", 0, match.start()) + 1
                column = match.start() - text.rfind("\n", 0, match.start())
                where = f" on line {line}" if line > 1 else ""
                shown = key[:80].encode("utf-8", "replace").decode()
                return TextError(
                    f"it has the key “{shown}” twice in one object, again{where}; keep one",
                    line,
                    column,
                )
            open_keys[-1].add(key)
    raise AssertionError("the decoder found a repeated key")


def _check_storable(value: Any) -> None:  # noqa: ANN401 (JSON)
    """Refuse text of a JSON value that no tokenizer or database takes, by the name of its key."""
    pending = [("", value)]
    while pending:
        name, each = pending.pop()
        if isinstance(each, str):
            storable(each, name or "it")
        elif isinstance(each, dict):
            for key in each:
                storable(key, "a key")
            pending += reversed(each.items())
        elif isinstance(each, list):
            pending += [(name, inner) for inner in reversed(each)]


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
