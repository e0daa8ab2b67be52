"""Optimistic locking of forms: reject a change if the values changed since the form opened.

A form carries a version mark of the values that it showed. The service compares it with the mark
of the current values, under the same lock or condition as the write.
"""

import hashlib
import json
from datetime import datetime

from django.utils.timezone import localtime

from webapp.core.problems import ConflictProblem

SEEN = "seen"  # the form field that carries the mark


def mark_of(value: object) -> str:
    """Return a short version mark (a hash) of a JSON value."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def changed_words(what: str, by: str, at: datetime | str | None, *, reader: str = "") -> str:
    """Return a sentence that says who changed an object since the page was opened, and when.

    ``at`` is an instant or its ISO text; ``reader`` is the user name of the reader.
    """
    who = "you, in another window" if by and by == reader else by or "somebody"
    return f"{what} changed by {who}{_when(at)} since you opened this page."


def _when(at: datetime | str | None) -> str:
    instant = datetime.fromisoformat(at) if isinstance(at, str) and at else at
    return f" on {localtime(instant):%-d %b at %H:%M:%S}" if isinstance(instant, datetime) else ""


def refuse_stale(
    seen: str, now_there: object, what: str, by: str, at: datetime | str | None, *, reader: str
) -> None:
    """Reject a form whose mark differs from the current values; a form without a mark passes.

    Raises:
        ConflictProblem: the values differ; the message says who changed them and when.
    """
    if seen and seen != mark_of(now_there):
        sentence = changed_words(what, by, at, reader=reader)
        raise ConflictProblem(
            "changed_meanwhile",
            f"{sentence} Your change was not saved. These are the current values; make "
            "your change again.",
        )
