"""Redis connections of the web side, and a circuit breaker for an unavailable Redis."""

import time
from functools import cache

import redis
from django.conf import settings

from runners.redis_access import connect

RETRY_AFTER_SECONDS = 1.0
CONSUMER = "slipway-consumer"  # reads the hosts' event streams
DISPATCHER = "slipway-dispatcher"  # sends wake signals to hosts
_roles: dict[tuple[str, str], str] = {}


@cache
def client(url: str) -> redis.Redis:
    """Return this process's client for a Redis URL, with short timeouts."""
    limits = {"socket_timeout": 2, "socket_connect_timeout": 1, "health_check_interval": 10}
    return connect(url, settings.REDIS_CA, **limits)


def connection(role: str = "") -> redis.Redis:
    """Return this process's client for the configured Redis, with the role's user if set."""
    return client(url_for(role))


def url_for(role: str) -> str:
    """Return the Redis URL of a role; the configured URL if the role has no own user."""
    return _roles.get((settings.REDIS_URL, role), settings.REDIS_URL)


def take_role(role: str, url: str) -> None:
    """Set the Redis URL that this process uses for a role."""
    _roles[settings.REDIS_URL, role] = url


def is_of_one_host(error: BaseException | None) -> bool:
    """Return whether an error is Redis's WRONGTYPE for the value of a host's key.

    A host's users may write any type of value under the host's prefix.
    """
    while error is not None and "WRONGTYPE" not in str(error):
        error = error.__cause__ or error.__context__
    return error is not None


class Breaker:
    """Circuit breaker: after a failure, fail at once for a second instead of timing out."""

    def __init__(self) -> None:
        self._closed_at = 0.0

    def is_open(self) -> bool:
        """Return whether it is too early to retry."""
        return time.monotonic() < self._closed_at

    def trip(self) -> None:
        """Record a failure."""
        self._closed_at = time.monotonic() + RETRY_AFTER_SECONDS
