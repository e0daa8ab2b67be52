"""Messages that a hostile or broken host could send: a valid one with one value replaced."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

DEEP = '{"a":' * 900 + "1" + "}" * 900
# As JSON text, because some of it no Python value can say: NaN, lone surrogates, long integers.
VALUES = (
    "null", "true", "-1", "0", "1e308", "-1e308", "1e400", "NaN", "Infinity", "-Infinity",
    "1" + "0" * 30, "-1" + "0" * 30, str(2**63), str(2**63 - 1), "9" * 4400, '""',
    '"\\u0000"', '"\\ud800"', '"\\ud800\\u0000 <script>alert(1)</script>"', '"{{ 7 }}{% x %}"',
    json.dumps("x" * 70_000), json.dumps("../" * 100), json.dumps("ä" * 300), "[]", "{}", "[null]",
    '[{"x": 1}]', json.dumps(list(range(3000))), json.dumps({f"m{n}": 1.0 for n in range(3000)}),
    json.dumps({"k" * 400: 1}), '{"\\u0000": 1, "\\ud800": 2}', DEEP, "{", "",
)  # fmt: skip
MARK = "\u2603hostile\u2603"


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value within a JSON document, the whole of it last."""
    items = value.items() if isinstance(value, dict) else []
    items = enumerate(value) if isinstance(value, list) else items
    for key, one in items:
        yield from paths(one, (*at, key))
    yield at


def with_text(message: dict[str, Any], at: tuple[Any, ...], text: str) -> str:
    """Return the JSON of a message with the value at a place replaced by a JSON text."""
    if not at:
        return text
    changed = copy.deepcopy(message)
    inner: Any = changed
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = MARK
    return json.dumps(changed).replace(json.dumps(MARK), text)


def messages(message: dict[str, Any], count: int, seed: int) -> Iterator[str]:
    """Yield hostile variants of a valid message: all of them, or so many drawn by a seed."""
    places = [(at, text) for at in paths(message) for text in VALUES]
    found = places if count >= len(places) else random.Random(seed).sample(places, count)  # noqa: S311
    for at, text in found:
        yield with_text(message, at, text)
    yield with_text(message | {"unknown": MARK}, ("unknown",), "1")


def endless(message: dict[str, Any], seed: int) -> Iterator[str]:
    """Yield hostile variants of a valid message without end, first with one value replaced."""
    chance = random.Random(seed)  # noqa: S311
    places = list(paths(message))
    singles = [(at, text) for at in places for text in VALUES]
    chance.shuffle(singles)
    for at, text in singles:
        yield with_text(message, at, text)
    while True:
        yield _with_texts(message, places, chance)


def _with_texts(
    message: dict[str, Any], places: list[tuple[Any, ...]], chance: random.Random
) -> str:
    """Return a message with several of its values replaced, deeper ones first."""
    chosen = sorted(chance.sample(places, min(len(places), chance.randint(2, 4))), key=len)
    changed = copy.deepcopy(message)
    texts = {}
    for number, at in enumerate(reversed([each for each in chosen if each])):
        inner: Any = changed
        for key in at[:-1]:
            inner = inner[key]
        mark = f"{MARK}{number}"
        inner[at[-1]] = mark
        texts[json.dumps(mark)] = chance.choice(VALUES)
    text = json.dumps(changed)
    for mark, value in texts.items():
        text = text.replace(mark, value)
    return text
