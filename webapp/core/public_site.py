"""The settings of a site that people reach over TLS, from the one address that they type.

A loopback installation has none of them: it has no certificate, and its browser would refuse
cookies that are for TLS alone. No Django here: the settings are made of this.
"""

from typing import Any
from urllib.parse import urlsplit

YEAR_SECONDS = 31_536_000
# What this machine asks itself over loopback: its health, and its own host's calls.
PLAIN_PATHS = [r"^healthz$", r"^readyz$", r"^api/v1/(hosts|attempts)/"]


class PublicUrlError(ValueError):
    """SLIPWAY_PUBLIC_URL is not the address of a site."""


def public_hosts(url: str) -> list[str]:
    """Return the names under which a site is asked for."""
    return [name] if url and (name := urlsplit(url).hostname) else []


def public_site(url: str) -> dict[str, Any]:
    """Return the settings that go with a public address; none without one.

    Raises:
        PublicUrlError: the address is no https address of a site's root.
    """
    if not url:
        return {}
    parts = urlsplit(url)
    if parts.scheme != "https" or not parts.hostname or parts.path.strip("/"):
        raise PublicUrlError(
            f"SLIPWAY_PUBLIC_URL is {url!r}: give the https address of the site's first page, "
            "such as https://slipway.example.org, or leave it unset on one machine"
        )
    return {
        "CSRF_TRUSTED_ORIGINS": [f"https://{parts.netloc}"],
        "CSRF_COOKIE_NAME": "__Host-csrftoken",
        "CSRF_COOKIE_SECURE": True,
        "SESSION_COOKIE_NAME": "__Host-session",
        "SESSION_COOKIE_SECURE": True,
        "SECURE_SSL_REDIRECT": True,
        "SECURE_SSL_HOST": parts.netloc,
        "SECURE_REDIRECT_EXEMPT": PLAIN_PATHS,
        "SECURE_HSTS_SECONDS": YEAR_SECONDS,
        "SECURE_HSTS_INCLUDE_SUBDOMAINS": True,
        # Preloading binds a whole domain for good: its owner's choice and not this product's.
        "SILENCED_SYSTEM_CHECKS": ["security.W021"],
    }
