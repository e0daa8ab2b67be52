"""Redis addresses and users, in plain strings: needs nothing but Python.

Each host has two users, one for the worker of its doorbell and one for its shipper. Both see
the keys below ``host:<id>:`` and nothing else; the server writes their rules.
"""

from urllib.parse import parse_qsl, urlencode, urlsplit

TLS_SCHEMES = ("rediss",)
UNVERIFIED = {"ssl_cert_reqs": {"none", "optional"}, "ssl_check_hostname": {"false", "0", "no"}}


class UnsafeAddressError(ValueError):
    """An address that would be spoken to without knowing who answers."""


def key_prefix(host_id: str) -> str:
    """Return what every key of a host starts with."""
    return f"host:{host_id}:"


def worker_user(host_id: str) -> str:
    """Return the Redis user of a host's Celery worker."""
    return f"h_{host_id}"


def shipper_user(host_id: str) -> str:
    """Return the Redis user that writes a host's events."""
    return f"s_{host_id}"


def pong_key(host_id: str) -> str:
    """Return the list into which a host's worker answers a ping that asks for it."""
    return f"{key_prefix(host_id)}pong"


def bare(url: str) -> str:
    """Return an address without its user and password."""
    parts = urlsplit(url)
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    query = urlencode([pair for pair in pairs if pair[0] not in {"username", "password"}])
    place = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{place}{parts.path}{'?' + query if query else ''}"


def with_user(url: str, user: str, secret: str) -> str:
    """Return an address for one user; names and secrets here need no escapes."""
    parts = urlsplit(bare(url))
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{user}:{secret}@{parts.netloc}{parts.path}{query}"


def celery_url(url: str) -> str:
    """Return a Redis address as Celery spells it: unix sockets have another scheme there."""
    if url.startswith("unix://"):
        return f"redis+socket://{url.removeprefix('unix://').replace('?db=', '?virtual_host=')}"
    return url


def is_encrypted(url: str) -> bool:
    """Return whether an address speaks TLS."""
    return urlsplit(url).scheme in TLS_SCHEMES


def check_verified(url: str) -> None:
    """Refuse an address that switches the check of the server's certificate off.

    Raises:
        UnsafeAddressError: with the option, its value and the way out.
    """
    for name, value in parse_qsl(urlsplit(url).query):
        if value.lower() in UNVERIFIED.get(name, ()):
            raise UnsafeAddressError(
                f"{name}={value} in the Redis address switches off the check of its certificate: "
                "whoever answers there would be believed. Take it out, and name the certificate "
                "authority in SLIPWAY_REDIS_CA if it is your own"
            )
