"""Headers that every answer of the site has, whichever of its processes gives it."""

from collections.abc import MutableMapping
from typing import Any

from django.conf import settings

from webapp.core.problems import Send


def with_defaults(send: Send) -> Send:
    """Return a ``send`` that adds nosniff and, behind TLS, HSTS to responses without them."""
    defaults = [(b"x-content-type-options", b"nosniff")]
    if settings.SECURE_HSTS_SECONDS:
        subdomains = "; includeSubDomains" if settings.SECURE_HSTS_INCLUDE_SUBDOMAINS else ""
        value = f"max-age={settings.SECURE_HSTS_SECONDS}{subdomains}"
        defaults.append((b"strict-transport-security", value.encode()))

    async def guarded(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message["headers"]}
            added = [header for header in defaults if header[0] not in names]
            message["headers"] = [*message["headers"], *added]
        await send(message)

    return guarded
