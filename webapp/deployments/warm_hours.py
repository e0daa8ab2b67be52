"""Hours in which a deployment is kept awake, as a text that people write (``EXAMPLE``).

A time zone of the IANA database may end it, UTC otherwise. A window whose end is not after
its begin ends on the next day; 24:00 is the end of a day.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
MOST_WINDOWS = 20
MOST_LENGTH = 400
DAY_MINUTES = 24 * 60
EXAMPLE = "mon-fri 08:00-18:00, sat 10:00-14:00 Europe/Berlin"
_WINDOW = re.compile(
    r"(?P<first>[a-z]{3})(?:-(?P<last>[a-z]{3}))?\s+(?P<begin>\d{1,2}:\d\d)-(?P<end>\d{1,2}:\d\d)"
)


@dataclass(frozen=True)
class Window:
    """Minutes of some days of the week, 0 for Monday; ``end`` is beyond a day past midnight."""

    days: frozenset[int]
    begin: int
    end: int


@dataclass(frozen=True)
class WarmHours:
    """Windows of the week in a time zone."""

    windows: tuple[Window, ...]
    zone: tzinfo

    def cover(self, instant: datetime) -> bool:
        """Return whether an instant lies in one of the windows."""
        local = instant.astimezone(self.zone)
        minute = local.hour * 60 + local.minute
        yesterday = (local.weekday() - 1) % 7
        return any(
            (local.weekday() in each.days and each.begin <= minute < each.end)
            or (yesterday in each.days and minute + DAY_MINUTES < each.end)
            for each in self.windows
        )

    def end_after(self, instant: datetime) -> datetime | None:
        """Return when the hours that cover an instant end, at most a week on, to the minute.

        None: within a week they do not end.
        """
        minute = instant.replace(second=0, microsecond=0)
        last = minute + timedelta(days=8)
        while minute < last and self.cover(minute):
            minute += timedelta(minutes=self._steady_minutes(minute))
        return None if minute >= last else minute

    def _steady_minutes(self, instant: datetime) -> int:
        """Return for how many minutes nothing changes; one where clocks may be set."""
        local = instant.astimezone(self.zone)
        minute = local.hour * 60 + local.minute
        borders = {at % DAY_MINUTES for each in self.windows for at in (each.begin, each.end)}
        left = min((at - minute - 1) % DAY_MINUTES + 1 for at in {*borders, 0})
        later = (instant + timedelta(minutes=left)).astimezone(self.zone)
        return left if later.utcoffset() == local.utcoffset() else 1


@lru_cache(maxsize=1024)
def warm_hours(text: str) -> WarmHours:
    """Read hours; an empty text has none.

    Raises:
        ValueError: the text is not like ``EXAMPLE``.
    """
    *parts, last = [each.strip() for each in text.split(",")]
    found = re.fullmatch(r"(?P<window>.*\d)(?:\s+(?P<zone>[A-Za-z]\S*))?", last)
    zone = _zone(found["zone"]) if found and found["zone"] else UTC
    texts = [*parts, found["window"] if found else last]
    if len(text) > MOST_LENGTH or len(texts) > MOST_WINDOWS:
        raise ValueError(f"these are more than {MOST_WINDOWS} windows")
    return WarmHours(tuple(_window(each) for each in texts) if text.strip() else (), zone)


def _window(text: str) -> Window:
    found = _WINDOW.fullmatch(text.lower())
    if found is None:
        raise ValueError(f"{text[:40]!r} is no window such as “mon-fri 08:00-18:00”")
    first, last = (_day(found[name] or found["first"]) for name in ("first", "last"))
    begin, end = (_minutes(found[name]) for name in ("begin", "end"))
    days = frozenset((first + number) % 7 for number in range((last - first) % 7 + 1))
    return Window(days, begin, end if end > begin else end + DAY_MINUTES)


def _day(name: str) -> int:
    if name not in DAYS:
        raise ValueError(f"{name!r} is no day; they are {', '.join(DAYS)}")
    return DAYS.index(name)


def _minutes(text: str) -> int:
    hour, minute = map(int, text.split(":"))
    if minute >= 60 or hour * 60 + minute > DAY_MINUTES:  # noqa: PLR2004 -- of an hour
        raise ValueError(f"{text} is no time between 00:00 and 24:00")
    return hour * 60 + minute


def _zone(name: str) -> tzinfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"{name[:60]!r} is no time zone such as Europe/Berlin") from None
