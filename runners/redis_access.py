"""Connections to Redis; over TLS the certificate is always verified."""

import ssl
from pathlib import Path
from typing import Any

import redis

from runners.redis_address import celery_url, check_verified, is_encrypted


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
