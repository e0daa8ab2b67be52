"""Limits of clients' keys, in the form of OpenAI's headers.

Requests per minute and at the same time are counted by each gateway process; tokens of a day are
those of all. A minute's requests may come at once; as many more come back evenly in a minute.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

from webapp.core.clock import now
from webapp.core.pace import Limit, Pace
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
    def held(self, key: Key, pending_tokens: int) -> Iterator[Mapping[str, str]]:
        """Count a request while the block runs; yield the headers of its answer.

        ``pending_tokens`` are those that the database does not have yet.

        Raises:
            Refusal: the key is at a limit.
        """
        headers = self._checked(key, key.used_today + pending_tokens)
        self._running[key.id] += 1
        try:
            yield headers
        finally:
            self._running[key.id] -= 1
            if not self._running[key.id]:
                del self._running[key.id]

    def _checked(self, key: Key, used: int) -> dict[str, str]:
        headers: dict[str, str] = {}
        limit = key.tokens_per_day
        if limit is not None:
            reset = _seconds_to_midnight()
            headers |= _headers("tokens", limit, max(0, limit - used), reset)
            if used >= limit:
                words = f"This key has used {used:,} of its {limit:,} tokens of today (UTC)."
                raise Refusal(429, words, "tokens_per_day", headers | _again(reset))
        limit = MOST_RUNNING if key.max_concurrency is None else key.max_concurrency
        if (running := self._running[key.id]) >= limit:
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


def _seconds_to_midnight() -> float:
    instant = now()
    midnight = (instant + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    return (midnight - instant).total_seconds()
