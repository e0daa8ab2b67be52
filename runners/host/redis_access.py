"""Connections to Redis, and the stream between a host's shipper and the server's consumer."""

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import redis
from pydantic import TypeAdapter

from runners.jobspec.base import parse_json
from runners.shared.messages import EventBatch, ReceivedBatch, RunEvent
from runners.shared.redis_address import celery_url, check_verified, is_encrypted


def connect(url: str, ca_file: Path | str | None = None, **options: Any) -> redis.Redis:
    """Return a client; over TLS it verifies the certificate and its name.

    Raises:
        UnsafeAddressError: the address disables the verification.
    """
    return redis.Redis.from_url(url, **client_options(url, ca_file), **options)


def client_options(url: str, ca_file: Path | str | None = None) -> dict[str, Any]:
    """Return a client's TLS options for verifying the server.

    Raises:
        UnsafeAddressError: the address disables the verification.
    """
    check_verified(url)
    if not is_encrypted(url):
        return {}
    options = {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
    return options | ({"ssl_ca_certs": str(ca_file)} if ca_file else {})


def celery_options(url: str, ca_file: Path | str | None = None) -> dict[str, Any]:
    """Return an address's Celery settings, which enable TLS verification.

    Raises:
        UnsafeAddressError: the address disables the verification.
    """
    check_verified(url)
    settings: dict[str, Any] = {"broker_url": celery_url(url)}
    if is_encrypted(url):
        settings["broker_use_ssl"] = {
            "ssl_cert_reqs": ssl.CERT_REQUIRED,
            "ssl_check_hostname": True,
            "ssl_ca_certs": str(ca_file) if ca_file else None,
        }
    return settings


# Redis keys and entry format between a host's shipper and the server's consumer.
#
# One stream and one hash per host. An entry is one ``EventBatch``: ``a`` attempt id, ``f`` fence,
# ``b`` the JSON list of its consecutive events. The hash maps attempt id -> the highest stored
# sequence number.


CONSUMER_GROUP = "web"
MAX_ENTRY_BYTES = 8 * 1024**2  # of a batch's events; usual batches are far smaller
_EVENTS = TypeAdapter(tuple[RunEvent, ...])


def events_key(host_id: str) -> str:
    """Return the key of the stream that the host's shipper writes."""
    return f"host:{host_id}:events"


def ack_key(host_id: str) -> str:
    """Return the key of the hash that the server's consumer writes."""
    return f"host:{host_id}:ack"


def encode(batch: EventBatch) -> dict[str, str]:
    """Return the stream entry of a batch."""
    return {
        "a": batch.attempt_id,
        "f": batch.fence,
        "b": _EVENTS.dump_json(batch.events).decode(),
    }


def decode(fields: Mapping[bytes | str, bytes | str]) -> ReceivedBatch:
    """Return the batch of a stream entry; damaged events become ``RefusedEvent``.

    Raises:
        ValueError: a field is missing, too large or malformed.
    """
    text = {_text(key): _text(value) for key, value in fields.items()}
    try:
        body = text["b"]
        if len(body) > MAX_ENTRY_BYTES:
            msg = f"stream entry has {len(body)} bytes of events; the limit is {MAX_ENTRY_BYTES}"
            raise ValueError(msg)
        given = {"attempt_id": text["a"], "fence": text["f"], "events": parse_json(body)}
        return ReceivedBatch.model_validate(given)
    except KeyError as missing:
        raise ValueError(f"stream entry lacks the field {missing}") from None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
