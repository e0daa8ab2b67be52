"""Text helpers: capitalise messages, list names, format actors, name operator classes."""

import re
from collections.abc import Sequence

# Display names of the planner's operator classes, shared by several pages.


OPERATOR_WORDS = {
    "compute": "Arithmetic",
    "memory_bandwidth": "Memory traffic",
    "communication": "Communication",
    "overhead": "Overhead per step",
    "memory": "Memory use",
}


# An identifier, such as a field or a dtype: lower-case letters with an underscore, digit or dot
# inside; or a product's name with a capital inside, such as vLLM.
NAME = re.compile(r"[a-z]+(?:[0-9_A-Z]|\.\w)[\w.]*(?=[\s:,]|$)")


def capitalised(text: str) -> str:
    """Return a text with a capital first letter; a leading identifier stays unchanged.

    >>> capitalised("needs 3 GiB"), capitalised("tpot_seconds is 0.2 s")
    ('Needs 3 GiB', 'tpot_seconds is 0.2 s')
    """
    return text if NAME.match(text) else f"{text[:1].upper()}{text[1:]}"


def actor_words(actor: str) -> str:
    """Return the display name of an actor: a person, a host, or a part of the product.

    >>> actor_words("alice"), actor_words("host:node-a"), actor_words("system:allocator")
    ('alice', 'host node-a', 'Slipway (allocator)')
    """
    kind, _, name = actor.partition(":")
    if not name:
        return actor
    return {"host": f"host {name}", "system": f"Slipway ({name})"}.get(kind, actor)


def listed(names: Sequence[str]) -> str:
    """Return names as an enumeration.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    *most, last = names or [""]
    return f"{', '.join(most)} and {last}" if most else last


def sentence(text: str) -> str:
    """Return a message as a complete sentence.

    >>> sentence("the model is unknown")
    'The model is unknown.'
    """
    return f"{capitalised(text.rstrip('.'))}."
