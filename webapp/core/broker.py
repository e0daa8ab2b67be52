"""The web side's connections to Redis, and the one breaker that keeps a dead one from hurting."""

import time
from functools import cache

import redis
from django.conf import settings

from runners.redis_access import connect

RETRY_AFTER_SECONDS = 1.0
CONSUMER = "slipway-consumer"  # reads what hosts report
DISPATCHER = "slipway-dispatcher"  # rings hosts
_roles: dict[tuple[str, str], str] = {}


@cache
def client(url: str) -> redis.Redis:
    """Return this process's client for a Redis URL, with timeouts that never hang a request."""
    limits = {"socket_timeout": 2, "socket_connect_timeout": 1, "health_check_interval": 10}
    return connect(url, settings.REDIS_CA, **limits)


def connection(role: str = "") -> redis.Redis:
    """Return this process's client for the configured Redis, as the role's user if it has one."""
    return client(url_for(role))


def url_for(role: str) -> str:
    """Return the address for a role; without a user of its own it is the configured one."""
    return _roles.get((settings.REDIS_URL, role), settings.REDIS_URL)


def take_role(role: str, url: str) -> None:
    """Have this process use a user of its own for a role from now on."""
    _roles[settings.REDIS_URL, role] = url


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
