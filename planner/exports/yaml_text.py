"""Write plain data as YAML: mappings, lists and scalars, and nothing that needs a tag."""

import json
import re
from collections.abc import Iterator
from typing import Any

PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./@-]*(?::[A-Za-z0-9_.-]+)?")
# Words that YAML 1.1 reads as something else than text.
RESERVED = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n", "."})


def yaml_text(value: Any) -> str:  # noqa: ANN401 - any plain data
    """Return plain data as a YAML document; texts are quoted where YAML would misread them.

    >>> print(yaml_text({"a": [1, {"b": "yes"}], "c": {}}))
    a:
      - 1
      - b: "yes"
    c: {}
    <BLANKLINE>
    """
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Any) -> Iterator[str]:  # noqa: ANN401 - any plain data
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _entry(f"{_scalar(key)}:", inner)
    elif isinstance(value, list | tuple) and value:
        for inner in value:
            yield from _item(inner)
    else:
        yield _scalar(value)


def _entry(head: str, value: Any) -> Iterator[str]:  # noqa: ANN401 - any plain data
    if isinstance(value, str) and "\n" in value:
        yield f"{head} |"
        yield from (f"  {line}" if line else "" for line in value.rstrip("\n").split("\n"))
    elif isinstance(value, dict | list | tuple) and value:
        yield head
        yield from (f"  {line}" for line in _lines(value))
    else:
        yield f"{head} {_scalar(value)}"


def _item(value: Any) -> Iterator[str]:  # noqa: ANN401 - any plain data
    if isinstance(value, str) and "\n" in value:
        yield from _entry("-", value)
        return
    for number, line in enumerate(_lines(value)):
        yield f"{'  ' if number else '- '}{line}"


def _scalar(value: Any) -> str:  # noqa: ANN401 - any plain data
    plain = isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in RESERVED
    return str(value) if plain else json.dumps(value, ensure_ascii=False)
