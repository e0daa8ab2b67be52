"""Write plain data as YAML: mappings, lists and scalars, and nothing that needs a tag.

What is written reads back as the same data under YAML 1.1, which most tools still speak.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

PLAIN = re.compile(r"(?:[A-Za-z_/]|\.\.?/)[A-Za-z0-9_./@-]*(?::[A-Za-z0-9_.-]+)?")
# Words that YAML 1.1 reads as something else than text.
RESERVED = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
UNICODE_16_BITS = 0xFFFF


def yaml_text(value: Any) -> str:  # noqa: ANN401 - any plain data
    """Return plain data as a YAML document; texts are quoted where YAML would misread them.

    >>> print(yaml_text({"a": [1, {"b": "yes"}], "c": {}, "d": 1e-5}))
    a:
      - 1
      - b: "yes"
    c: {}
    d: 1.0e-05
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
    if _is_block(value):
        yield f"{head} |{_chomping(value)}"
        yield from (f"  {line}" if line else "" for line in value.removesuffix("\n").split("\n"))
    elif isinstance(value, dict | list | tuple) and value:
        yield head
        yield from (f"  {line}" for line in _lines(value))
    else:
        yield f"{head} {_scalar(value)}"


def _item(value: Any) -> Iterator[str]:  # noqa: ANN401 - any plain data
    if _is_block(value):
        yield from _entry("-", value)
        return
    for number, line in enumerate(_lines(value)):
        yield f"{'  ' if number else '- '}{line}"


def _is_block(value: Any) -> bool:  # noqa: ANN401 - any plain data
    """Return whether a text of several lines can stand as it is, a line each."""
    if not isinstance(value, str) or "\n" not in value:
        return False
    lines = value.split("\n")
    begins_plainly = lines[0] != "" and not lines[0].startswith(" ")
    return begins_plainly and all(line.isprintable() for line in lines)


def _chomping(text: str) -> str:
    """Return how a block ends: without a line break, with one, or with several that are kept."""
    if not text.endswith("\n"):
        return "-"
    return "+" if text.endswith("\n\n") else ""


def _scalar(value: Any) -> str:  # noqa: ANN401 - any plain data
    if isinstance(value, str):
        is_plain = PLAIN.fullmatch(value) and value.lower() not in RESERVED
        return value if is_plain else _quoted(value)
    return _float(value) if isinstance(value, float) else json.dumps(value)


def _quoted(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(each if each.isprintable() else _escaped(each) for each in quoted)


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code <= UNICODE_16_BITS else f"\\U{code:08x}"


def _float(value: float) -> str:
    """Return a float that no reader takes for a text: a point before the exponent."""
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    mantissa, mark, exponent = repr(value).partition("e")
    return mantissa + ("" if "." in mantissa else ".0") + mark + exponent
