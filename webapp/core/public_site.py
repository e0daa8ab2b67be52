"""Settings of a site behind TLS, derived from its public URL.

A loopback installation has none of them: it has no certificate, and browsers would reject secure
cookies. The settings import this module, so it does not import Django.
"""

from typing import Any
from urllib.parse import urlsplit

YEAR_SECONDS = 31_536_000
# Paths used over plain loopback: health checks and calls of the local host agent.
PLAIN_PATHS = [r"^healthz$", r"^readyz$", r"^api/v1/(hosts|attempts)/"]


class PublicUrlError(ValueError):
    """SLIPWAY_PUBLIC_URL is not the URL of a site."""


def public_hosts(url: str) -> list[str]:
    """Return the host name of a site's public URL as a list."""
    return [name] if url and (name := urlsplit(url).hostname) else []


def public_site(url: str) -> dict[str, Any]:
    """Return the Django settings of a public URL; {} without one.

    Raises:
        PublicUrlError: the URL is not the https URL of a site's root.
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
        "SESSION_COOKIE_NAME": "__Host-session",
        "SESSION_COOKIE_SECURE": True,
        "SECURE_SSL_REDIRECT": True,
        "SECURE_SSL_HOST": parts.netloc,
        "SECURE_REDIRECT_EXEMPT": PLAIN_PATHS,
        "SECURE_HSTS_SECONDS": YEAR_SECONDS,
        "SECURE_HSTS_INCLUDE_SUBDOMAINS": True,
        # W021: HSTS preloading is permanent for a whole domain, so it is the owner's choice.
        # W003: a subclass of the CSRF middleware is installed.
        "SILENCED_SYSTEM_CHECKS": ["security.W021", "security.W003"],
    }
