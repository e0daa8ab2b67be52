"""YAML and JSON documents within limits: depth, number of values, aliases and duplicate keys."""

import json
from collections.abc import Hashable, Iterator
from typing import Any

import yaml

from planner.imports.draft import REFUSED, Option, is_secret, refuse_many_settings, shown
from planner.specs.base import BadRequestError, JsonObject

MOST_DEPTH, MOST_VALUES, MOST_ALIASES, MOST_DOCUMENTS = 16, 10_000, 64, 32
WIDEST = 2**63
SHOWN_SCALAR = 128


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with limits, which names duplicate keys.

    An alias counts as often as it is used, so that nested aliases cannot grow a small text into a
    large document.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.depth = self.aliases = self.values = 0
        self.sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        self.depth += 1
        self.aliases += is_alias
        if self.depth > MOST_DEPTH:
            raise _limit(f"lists and mappings are nested deeper than {MOST_DEPTH} levels")
        if self.aliases > MOST_ALIASES:
            raise _limit(f"there are more than {MOST_ALIASES} aliases (*name)")
        before = self.values
        node = super().compose_node(parent, index)
        if is_alias and id(node) not in self.sizes:
            raise _limit("an alias (*name) contains itself")
        self.values += self.sizes[id(node)] if is_alias else 1
        self.sizes[id(node)] = self.values - before
        if self.values > MOST_VALUES:
            raise _limit(f"there are more than {MOST_VALUES:,} values, aliases counted")
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002 - PyYAML calls it so
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                raise _limit(f"line {line}: a key is a list or a mapping; write it as text")
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                line = key.start_mark.line + 1
                raise _limit(f"line {line}: the key {shown(key.value)!r} stands there twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _limit(what: str) -> BadRequestError:
    return BadRequestError(
        f"the YAML is not read: {what}; shorten or correct it, and paste the text again", "text"
    )


def read_yaml(text: str) -> list[Any]:
    """Return the documents of a YAML text.

    Raises:
        BadRequestError: it is no YAML, a key stands there twice, or it is beyond the limits.
    """
    documents: list[Any] = []
    try:
        loader = _Loader(text)
        while loader.check_data():  # type: ignore[no-untyped-call]  # of PyYAML's stubs
            if len(documents) == MOST_DOCUMENTS:
                raise _limit(f"there are more than {MOST_DOCUMENTS} documents")
            documents.append(loader.get_data())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise _limit(f"{where}{shown(problem)}") from error
    except (ValueError, OverflowError, AttributeError, TypeError, KeyError) as error:
        # PyYAML's own readers of dates, numbers and merges fail so on values out of range.
        raise _limit(f"a value cannot be read: {shown(error)}") from error
    refuse_wide_numbers(documents)
    return documents


def read_json(text: str) -> JsonObject:
    """Return a JSON object.

    Raises:
        BadRequestError: it is no JSON object, a key stands there twice, or it is nested too deep.
    """

    def unique(pairs: list[tuple[str, Any]]) -> JsonObject:
        read: JsonObject = {}
        for key, value in pairs:
            if key in read:
                raise BadRequestError(
                    f"the key {shown(key)!r} stands twice in the JSON: leave one, and paste the "
                    "text again",
                    "text",
                )
            read[key] = value
        return read

    try:
        document = json.loads(text, object_pairs_hook=unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(
            f"the text is not valid JSON: {shown(error)}; correct it, and paste it again", "text"
        ) from error
    if not isinstance(document, dict):
        raise BadRequestError(
            "the JSON is not an object: paste the whole file, from { to }", "text"
        )
    if _depth(document) > MOST_DEPTH:
        raise BadRequestError(
            f"the JSON is nested deeper than {MOST_DEPTH} levels: paste the configuration alone",
            "text",
        )
    refuse_wide_numbers(document)
    return document


def refuse_wide_numbers(document: object) -> None:
    """Refuse whole numbers beyond 64 bits, which no setting has.

    Raises:
        BadRequestError: a number is too large.
    """
    values = [document]
    while values:
        wide = [value for value in values if isinstance(value, int) and abs(value) >= WIDEST]
        if wide:
            digits = wide[0].bit_length() * 3 // 10
            raise BadRequestError(
                f"a number has about {digits} digits: whole numbers end at 64 bits; correct it, "
                "and paste the text again",
                "text",
            )
        values = [inner for outer in values for inner in _inside(outer)]


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _depth(value: object) -> int:
    """Return the levels of nesting, without recursion."""
    level, values = 0, [value]
    while values:
        level += 1
        values = [inner for outer in values for inner in _inside(outer)]
    return level


def _inside(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def options_of(document: JsonObject, prefix: str = "") -> dict[str, Option]:
    """Return the keys of a mapping as options, without those that are null or refused before.

    Raises:
        BadRequestError: there are more keys than any tool knows.
    """
    refuse_many_settings(len(document))
    options = {}
    for key, value in document.items():
        name = str(key)
        written = f"{prefix}{name}"
        hidden = "***" if is_secret(name) else _scalar(value)
        source = shown(f"{written}: {hidden}")
        if value is not None and value != "" and source not in REFUSED.get():
            options[name] = Option(name, value, source, written)
    return options


def _scalar(value: object) -> str:
    if isinstance(value, dict | list):
        return json.dumps(value, default=str, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else str(value)[:SHOWN_SCALAR]
