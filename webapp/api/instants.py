"""Instants and days in requests: ISO 8601 as documented, and no other text that could be one."""

import re
from datetime import date, datetime
from typing import Annotated

from pydantic import AwareDatetime, BeforeValidator

INSTANT = re.compile(
    r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d(:\d\d(\.\d{1,9})?)?([Zz]|[+-]\d\d:\d\d)", re.ASCII
)
LOST_PLUS = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d(:\d\d(\.\d+)?)? \d\d:\d\d", re.ASCII)
DAY = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)


def _instant(value: object) -> object:
    """Return an instant's text, which a lax reader would take for seconds since 1970 too.

    Raises:
        ValueError: it is not written as ISO 8601 with a time zone.
    """
    if isinstance(value, datetime) or (isinstance(value, str) and INSTANT.fullmatch(value)):
        return value
    text = str(value)[:40]
    if LOST_PLUS.fullmatch(text):
        msg = f"It is {text!r}: in an address, + means a blank. Write its zone as %2B or as Z"
        raise ValueError(msg)
    msg = f"It is {text!r}; write an instant with its time zone, such as 2026-11-28T09:00:00Z"
    raise ValueError(msg)


def _day(value: object) -> object:
    """Return a day's text.

    Raises:
        ValueError: it is not written as YYYY-MM-DD.
    """
    if isinstance(value, date) or (isinstance(value, str) and DAY.fullmatch(value)):
        return value
    msg = f"It is {str(value)[:40]!r}; write a day such as 2026-11-28"
    raise ValueError(msg)


Instant = Annotated[AwareDatetime, BeforeValidator(_instant)]
Day = Annotated[date, BeforeValidator(_day)]
