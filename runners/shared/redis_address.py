"""Redis URLs and user names as plain strings. Standard library only.

Each host has two users, one for its doorbell worker and one for its shipper. Both can access
only keys below ``host:<id>:``; the server writes their ACL rules.
"""

from urllib.parse import parse_qsl, quote, urlencode, urlsplit

SCHEMES = ("redis", "rediss", "unix")
TLS_SCHEMES = ("rediss",)
UNVERIFIED = {"ssl_cert_reqs": {"none", "optional"}, "ssl_check_hostname": {"false", "0", "no"}}


ESCAPES = "/ ? # @ and : of a password are written as %2F %3F %23 %40 and %3A"


class RedisAddressError(ValueError):
    """A text is not a Redis URL; the message says why, without a part of the password."""


class UnsafeAddressError(RedisAddressError):
    """A Redis URL disables the verification of the server's certificate."""


def key_prefix(host_id: str) -> str:
    """Return the prefix of a host's keys."""
    return f"host:{host_id}:"


def worker_user(host_id: str) -> str:
    """Return the Redis user of a host's Celery worker."""
    return f"h_{host_id}"


def shipper_user(host_id: str) -> str:
    """Return the Redis user that writes a host's events."""
    return f"s_{host_id}"


def pong_key(host_id: str) -> str:
    """Return the key of the list for a host's ping replies."""
    return f"{key_prefix(host_id)}pong"


def bare(url: str) -> str:
    """Return a URL without user and password."""
    parts = urlsplit(url)
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    query = urlencode([pair for pair in pairs if pair[0] not in {"username", "password"}])
    place = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{place}{parts.path}{'?' + query if query else ''}"


def with_user(url: str, user: str, secret: str) -> str:
    """Return a URL for one user; these names and secrets need no escaping."""
    parts = urlsplit(bare(url))
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{user}:{secret}@{parts.netloc}{parts.path}{query}"


def celery_url(url: str) -> str:
    """Return a Redis URL in Celery's form, which has another scheme for Unix sockets."""
    if url.startswith("unix://"):
        return f"redis+socket://{url.removeprefix('unix://').replace('?db=', '?virtual_host=')}"
    return url


def is_encrypted(url: str) -> bool:
    """Return whether a URL uses TLS."""
    return urlsplit(url).scheme in TLS_SCHEMES


def checked(url: str) -> str:
    """Return a Redis URL without blanks around it, if every library reads it alike.

    Raises:
        RedisAddressError: it is none, or a library would silently take it for another.
        UnsafeAddressError: it disables the verification of the certificate.
    """
    url = url.strip()
    scheme = url.partition("://")[0]
    if "://" not in url or scheme not in SCHEMES:
        raise RedisAddressError("it does not begin with redis://, rediss:// or unix://")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise RedisAddressError(f"its host or port cannot be read; {ESCAPES}") from None
    if "#" in url or (scheme != "unix" and "@" in parts.path + parts.query):
        raise RedisAddressError(f"it has # or a second @; {ESCAPES}")
    if port == 0 or (scheme == "unix" and not parts.path.strip("/")):
        raise RedisAddressError("it names no port or no socket")
    if scheme != "unix" and not parts.path.strip("/").isdecimal() and parts.path.strip("/"):
        raise RedisAddressError("behind the host stands a database's number, such as /0")
    check_verified(url)
    return url


def socket_url(path: str) -> str:
    """Return the URL of a Unix socket, whatever characters its path has."""
    return f"unix://{quote(path)}"


def check_verified(url: str) -> None:
    """Reject a URL that disables the verification of the server's certificate.

    Raises:
        UnsafeAddressError: an option disables it; the message names the option and a remedy.
    """
    for name, value in parse_qsl(urlsplit(url).query):
        if value.lower() in UNVERIFIED.get(name, ()):
            raise UnsafeAddressError(
                f"{name}={value} in the Redis address switches off the check of its certificate: "
                "whoever answers there would be believed. Take it out, and name the certificate "
                "authority in SLIPWAY_REDIS_CA if it is your own"
            )
