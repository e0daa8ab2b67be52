"""Limits of clients' keys, in the form of OpenAI's headers.

Requests per minute and at the same time are counted by each gateway process; tokens of a day and
of a month are those of all: an answer's, once it has ended, so that a limit is passed by no more
than the answers that were open when it was met. A minute's requests may come at once; as many more
come back evenly in a minute. Of two limits of tokens the headers tell the one with less left.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta

from webapp.core.clock import now
from webapp.core.pace import Limit, Pace
from webapp.deployments.usage import periods_of
from webapp.gateway.refusals import Refusal
from webapp.gateway.routes import Key

MINUTE = 60.0
BUSY_SECONDS = 1  # Retry-After of a key with too many requests at the same time
MOST_RUNNING = 1000  # requests of a key without a limit of its own: there is room for others


class Limits:
    """The limits of all keys at one gateway."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()  # requests by key
        self._pace = Pace()

    @contextmanager
    def held(
        self, key: Key, pending_tokens: Callable[[str, str], int]
    ) -> Iterator[Mapping[str, str]]:
        """Count a request while the block runs; yield the headers of its answer.

        ``pending_tokens`` tells those of a key in a period that the snapshot does not have yet.

        Raises:
            Refusal: the key is at a limit.
        """
        headers = self._checked(key, pending_tokens)
        self._running[key.id] += 1
        try:
            yield headers
        finally:
            self._running[key.id] -= 1
            if not self._running[key.id]:
                del self._running[key.id]

    def _checked(self, key: Key, pending_tokens: Callable[[str, str], int]) -> dict[str, str]:
        headers = _token_headers(key, pending_tokens)
        most = MOST_RUNNING if key.max_concurrency is None else key.max_concurrency
        if (running := self._running[key.id]) >= most:
            words = f"{running} requests with this key run, the most that it may have."
            raise Refusal(429, words, "max_concurrency", headers | _again(BUSY_SECONDS))
        limit = key.requests_per_minute
        if limit is not None:
            rate = Limit("One key", limit / MINUTE, limit)
            wait = self._pace.count(rate, key.id)
            left, seconds = self._pace.rest(rate, key.id)
            headers |= _headers("requests", limit, left, seconds)
            if wait:
                words = f"This key may send {limit:,} requests a minute; they are used up."
                raise Refusal(429, words, "requests_per_minute", headers | _again(wait))
        return headers


def _headers(unit: str, limit: int, left: int, reset_seconds: float) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{unit}": str(limit),
        f"x-ratelimit-remaining-{unit}": str(left),
        f"x-ratelimit-reset-{unit}": f"{math.ceil(reset_seconds)}s",
    }


def _again(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds)))}


def _token_headers(key: Key, pending_tokens: Callable[[str, str], int]) -> dict[str, str]:
    """Return the headers of the limit of tokens that has the least left; none without a limit.

    Raises:
        Refusal: the tokens of the month or of the day are used up.
    """
    instant = now()
    day, month = periods_of(instant.date().isoformat())
    limits = (
        ("tokens_per_month", key.tokens_per_month, month, "this month", _next_month(instant)),
        ("tokens_per_day", key.tokens_per_day, day, "today", _next_day(instant)),
    )
    least, headers = math.inf, {}
    for code, limit, period, words, end in limits:
        if limit is None:
            continue
        used = key.used.get(period, 0) + pending_tokens(key.id, period)
        left, reset = max(0, limit - used), (end - instant).total_seconds()
        if left < least:
            least, headers = left, _headers("tokens", limit, left, reset)
        if not left:
            told = f"This key has used {used:,} of its {limit:,} tokens of {words} (UTC)."
            raise Refusal(429, told, code, headers | _again(reset))
    return headers


def _next_day(instant: datetime) -> datetime:
    return (instant + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)


def _next_month(instant: datetime) -> datetime:
    return _next_day(instant.replace(day=1) + timedelta(days=31)).replace(day=1)
