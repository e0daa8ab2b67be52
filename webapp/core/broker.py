"""The web side's connections to Redis, and the one breaker that keeps a dead one from hurting."""

import time
from functools import cache

import redis
from django.conf import settings

RETRY_AFTER_SECONDS = 1.0


@cache
def client(url: str) -> redis.Redis:
    """Return this process's client for a Redis URL, with timeouts that never hang a request."""
    return redis.Redis.from_url(
        url, socket_timeout=2, socket_connect_timeout=1, health_check_interval=10
    )


def connection() -> redis.Redis:
    """Return this process's client for the configured Redis."""
    return client(settings.REDIS_URL)


class Breaker:
    """After a failure, refuse for a second instead of waiting for the next time-out."""

    def __init__(self) -> None:
        self._closed_at = 0.0

    def is_open(self) -> bool:
        """Return whether it is too early to try again."""
        return time.monotonic() < self._closed_at

    def trip(self) -> None:
        """Remember a failure."""
        self._closed_at = time.monotonic() + RETRY_AFTER_SECONDS
