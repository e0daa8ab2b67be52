"""The YAML at the beginning of a data set's card, within limits: anyone may have written it.

Only what ``configs`` holds becomes values. An alias there is refused, since nested ones would grow
a small text into a large document; elsewhere it does no harm.
"""

import re
from typing import Any

import yaml

MOST_DEPTH = 64  # the C parser calls itself for each level, and ends the process at some thousands
MOST_VALUES = 250_000
LONGEST_TEXT = 1024  # characters of a name or a path
FRONT_MATTER = re.compile(r"---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class CardError(ValueError):
    """A card cannot be read; the message is a part of a sentence, with the card as its subject."""


def configs_of(card: str) -> list[dict[Any, Any]]:
    """Return the mappings that a card states under ``configs``.

    Raises:
        CardError: its beginning is no YAML, or beyond the limits.
    """
    matter = FRONT_MATTER.match(card)
    if matter is None:
        return []
    try:
        _check_size(matter[1])
        configs = _read(matter[1])
    except CardError:
        raise
    except (
        # PyYAML's own readers of numbers, dates and merges fail so on values that are none.
        yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, OverflowError,
        RecursionError,
    ):  # fmt: skip
        raise CardError("begins with what is no YAML") from None
    return [each for each in configs if isinstance(each, dict)]


def _check_size(text: str) -> None:
    depth = 0
    for number, event in enumerate(yaml.parse(text, _Loader)):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH:
            raise CardError(f"has YAML that is nested deeper than {MOST_DEPTH} levels")
        if number > MOST_VALUES:
            raise CardError(f"has YAML of more than {MOST_VALUES:,} values")


def _read(text: str) -> list[Any]:
    loader = _Loader(text)
    try:
        card = loader.get_single_node()
        rows = card.value if isinstance(card, yaml.MappingNode) else ()
        found = [node for key, node in rows if key.value == "configs"]
        if not found:
            return []
        _check_aliases(found[-1])
        configs = loader.construct_document(found[-1])
    finally:
        loader.dispose()
    return configs if isinstance(configs, list) else []


def _check_aliases(node: yaml.Node) -> None:
    """Refuse a node that stands twice in a tree."""
    seen: set[int] = set()
    nodes = [node]
    while nodes:
        each = nodes.pop()
        if id(each) in seen:
            raise CardError("has an alias (*name) in its configs")
        seen.add(id(each))
        if isinstance(each, yaml.MappingNode):
            nodes += [inner for row in each.value for inner in row]
        elif isinstance(each, yaml.SequenceNode):
            nodes += each.value


def text_of(value: object, field: str, usual: str = "") -> str:
    """Return a name or a path of a card, ``usual`` where none is stated.

    Raises:
        CardError: it is no text, or too long.
    """
    if value is None or value == "":
        return usual
    if not isinstance(value, str):
        raise CardError(f"states as {field} what is no text, which its author has to quote")
    if len(value) > LONGEST_TEXT:
        raise CardError(
            f"states a {field} of {len(value):,} characters, and {LONGEST_TEXT:,} are read"
        )
    return value
