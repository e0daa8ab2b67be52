"""E-mail settings from one URL; without it the site sends no e-mail.

The settings import this module, so it does not import Django.
"""

from typing import Any
from urllib.parse import unquote, urlsplit

TIMEOUT_SECONDS = 20
# Scheme -> (default port, STARTTLS, implicit TLS).
SCHEMES = {
    "smtp": (25, False, False),
    "smtp+tls": (587, True, False),
    "smtps": (465, False, True),
}


class EmailUrlError(ValueError):
    """SLIPWAY_EMAIL_URL is not a valid mail server URL."""


def email_settings(url: str, sender: str) -> dict[str, Any]:
    """Return the Django settings of a mail server; {} without one.

    Raises:
        EmailUrlError: the URL or the sender is invalid.
    """
    if not url:
        return {}
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise EmailUrlError(f"SLIPWAY_EMAIL_URL: {error}") from error
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise EmailUrlError(
            f"SLIPWAY_EMAIL_URL begins with {parts.scheme!r} and names the server "
            f"{parts.hostname!r}: give it as smtp+tls://user:password@mail.example.org:587, "
            "with smtps:// for TLS from the start and smtp:// for none"
        )
    if "@" not in sender:
        raise EmailUrlError(
            f"SLIPWAY_EMAIL_FROM is {sender!r}: name the address from which e-mail is sent, "
            "such as slipway@example.org"
        )
    default_port, starts_tls, is_tls = SCHEMES[parts.scheme]
    return {
        "EMAIL_HOST": parts.hostname,
        "EMAIL_PORT": port or default_port,
        "EMAIL_HOST_USER": unquote(parts.username or ""),
        "EMAIL_HOST_PASSWORD": unquote(parts.password or ""),
        "EMAIL_USE_TLS": starts_tls,
        "EMAIL_USE_SSL": is_tls,
        "EMAIL_TIMEOUT": TIMEOUT_SECONDS,
        "DEFAULT_FROM_EMAIL": sender,
    }
