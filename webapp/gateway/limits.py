"""Limits of clients' keys, in the form of OpenAI's headers.

Requests per minute and at the same time are counted by each gateway process; tokens of a day are
those of all.
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from webapp.core.clock import now
from webapp.gateway.refusals import Refusal
from webapp.gateway.routes import Key

MINUTE = 60.0
BUSY_SECONDS = 1  # Retry-After of a key with too many requests at the same time
MOST_RUNNING = 1000  # requests of a key without a limit of its own: there is room for others
MOST_STATES = 10_000  # keys whose times are kept


@dataclass
class KeyState:
    """The requests of one key: when they came in the last minute, and how many run."""

    times: deque[float] = field(default_factory=deque)
    running: int = 0


class Limits:
    """The limits of all keys at one gateway."""

    def __init__(self) -> None:
        self._states: dict[str, KeyState] = {}

    @contextmanager
    def held(self, key: Key, pending_tokens: int) -> Iterator[Mapping[str, str]]:
        """Count a request while the block runs; yield the headers of its answer.

        ``pending_tokens`` are those that the database does not have yet.

        Raises:
            Refusal: the key is at a limit.
        """
        state = self._state_of(key.id)
        headers = self._checked(key, state, key.used_today + pending_tokens)
        if key.requests_per_minute is not None:
            state.times.append(time.monotonic())
        state.running += 1
        try:
            yield headers
        finally:
            state.running -= 1

    def _state_of(self, key_id: str) -> KeyState:
        if len(self._states) > MOST_STATES:
            self._states = {key: each for key, each in self._states.items() if each.running}
        return self._states.setdefault(key_id, KeyState())

    def _checked(self, key: Key, state: KeyState, used: int) -> dict[str, str]:
        headers: dict[str, str] = {}
        limit = key.tokens_per_day
        if limit is not None:
            reset = _seconds_to_midnight()
            headers |= _headers("tokens", limit, max(0, limit - used), reset)
            if used >= limit:
                words = f"This key has used {used:,} of its {limit:,} tokens of today (UTC)."
                raise Refusal(429, words, "tokens_per_day", headers | _again(reset))
        limit = MOST_RUNNING if key.max_concurrency is None else key.max_concurrency
        if state.running >= limit:
            words = f"{state.running} requests with this key run, the most that it may have."
            raise Refusal(429, words, "max_concurrency", headers | _again(BUSY_SECONDS))
        limit = key.requests_per_minute
        if limit is not None:
            instant = time.monotonic()
            while state.times and state.times[0] <= instant - MINUTE:
                state.times.popleft()
            left = limit - len(state.times)
            reset = MINUTE - (instant - state.times[0]) if state.times else 0.0
            headers |= _headers("requests", limit, max(0, left - 1), reset)
            if left <= 0:
                words = f"This key may send {limit:,} requests a minute; they are used up."
                raise Refusal(429, words, "requests_per_minute", headers | _again(reset))
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
