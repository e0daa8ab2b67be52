"""Books: a folder of stored texts, one file an entry, that the product must still give.

A test makes an entry's text and passes it to ``Book.compare``, which fails with the first
differences. With ``--rewrite-books`` the text is stored instead.
"""

import difflib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
RELATIVE_TOLERANCE = 1e-9  # of floats: sums of another platform's libm differ in the last digits
MOST_DIFFERENCES = 12  # printed of one entry
WIDTH = 100  # characters of a JSON value that stays on one line

Differences = Callable[[str, str], Iterable[str]]


def line_differences(stored: str, made: str) -> Iterator[str]:
    """Yield the changed lines of a text, removed ones with ``-``, added ones with ``+``."""
    lines = difflib.unified_diff(stored.splitlines(), made.splitlines(), n=0, lineterm="")
    return (line for line in lines if not line.startswith(("---", "+++")))


def json_differences(stored: str, made: str) -> Iterator[str]:
    """Yield ``path: stored -> made`` of every value of a JSON document that differs."""
    return _value_differences("", json.loads(stored), json.loads(made))


def _value_differences(path: str, stored: Any, made: Any) -> Iterator[str]:
    match stored, made:
        case dict(), dict():
            for key in [*stored, *(key for key in made if key not in stored)]:
                yield from _member_differences(f"{path}.{key}".lstrip("."), key, stored, made)
        case list(), list():
            if len(stored) != len(made):
                yield f"{path}: {len(stored)} entries -> {len(made)}"
            for index, (one, other) in enumerate(zip(stored, made, strict=False)):
                yield from _value_differences(f"{path}[{_label(index, one)}]", one, other)
        case float(), float():
            is_close = math.isclose(stored, made, rel_tol=RELATIVE_TOLERANCE)
            if not (is_close or (math.isnan(stored) and math.isnan(made))):
                yield f"{path}: {stored!r} -> {made!r}"
        case _:
            if stored != made or type(stored) is not type(made):
                yield f"{path}: {_short(stored)} -> {_short(made)}"


def _member_differences(
    path: str, key: str, stored: dict[str, Any], made: dict[str, Any]
) -> Iterator[str]:
    if key not in made:
        yield f"{path}: {_short(stored[key])} -> absent"
    elif key not in stored:
        yield f"{path}: absent -> {_short(made[key])}"
    else:
        yield from _value_differences(path, stored[key], made[key])


def _label(index: int, value: Any) -> str:
    """Return the index of a list's value, with its key where it has one."""
    name = value.get("key") or value.get("symbol") if isinstance(value, dict) else None
    return f"{index} {name}" if name else str(index)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 2 * WIDTH else f"{text[: 2 * WIDTH]}…"


def json_text(value: Any, indent: str = "") -> str:
    """Return a JSON document whose short values stay on one line, which makes diffs readable."""
    line = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(line) <= WIDTH or not isinstance(value, dict | list) or not value:
        return line
    inner = indent + " "
    if isinstance(value, list):
        parts = [json_text(one, inner) for one in value]
        return f"[\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}]"
    parts = [f"{json.dumps(key)}: {json_text(one, inner)}" for key, one in value.items()]
    return f"{{\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}}}"


class Book:
    """The stored entries of one folder below ``tests/books``."""

    def __init__(self, name: str, suffix: str, differences: Differences) -> None:
        self.folder = FOLDER / name
        self.suffix = suffix
        self.differences = differences

    def path(self, entry: str) -> Path:
        return self.folder / f"{entry}{self.suffix}"

    def compare(self, entry: str, made: str, *, is_rewriting: bool) -> None:
        """Fail with the differences between the stored and the given text, or store the text."""
        path = self.path(entry)
        stored = path.read_text("utf-8") if path.exists() else None
        found = [] if stored is None else list(self.differences(stored, made))
        if is_rewriting:
            if stored is None or found:
                path.write_text(f"{made.rstrip()}\n", "utf-8")
            return
        name = path.relative_to(FOLDER.parents[1])
        if stored is None:
            pytest.fail(f"{name} is not stored: run with --rewrite-books", pytrace=False)
        if found:
            shown = "\n".join(f"  {one}" for one in found[:MOST_DIFFERENCES])
            more = len(found) - MOST_DIFFERENCES
            rest = f"\n  and {more} further differences" if more > 0 else ""
            words = "A change on purpose rewrites it: tests/books/README.md."
            pytest.fail(f"{name} differs:\n{shown}{rest}\n{words}", pytrace=False)

    def compare_entries(self, entries: Iterable[str], *, is_rewriting: bool) -> None:
        """Fail if a file is stored for which there is no entry, or remove it."""
        known = {self.path(entry) for entry in entries}
        left_over = sorted(set(self.folder.glob(f"*{self.suffix}")) - known)
        if is_rewriting:
            for path in left_over:
                path.unlink()
        elif left_over:
            names = ", ".join(path.name for path in left_over)
            pytest.fail(f"stored without an entry: {names}", pytrace=False)
