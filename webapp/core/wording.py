"""Sentences out of messages that begin in the middle of one."""

import re
from collections.abc import Sequence

# A name of the code, such as a field or a dtype: small letters with an underscore, a digit or a
# dot inside.
NAME = re.compile(r"[a-z]+(?:[0-9_]|\.\w)[\w.]*(?=[\s:,]|$)")


def capitalised(text: str) -> str:
    """Return a text with a capital first letter; a name of the code stays as it is written.

    >>> capitalised("needs 3 GiB"), capitalised("tpot_seconds is 0.2 s")
    ('Needs 3 GiB', 'tpot_seconds is 0.2 s')
    """
    return text if NAME.match(text) else f"{text[:1].upper()}{text[1:]}"


def listed(names: Sequence[str]) -> str:
    """Return names in a row.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    *most, last = names or [""]
    return f"{', '.join(most)} and {last}" if most else last


def sentence(text: str) -> str:
    """Return a message as a sentence that stands alone.

    >>> sentence("the model is unknown")
    'The model is unknown.'
    """
    return f"{capitalised(text.rstrip('.'))}."
