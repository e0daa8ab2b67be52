"""Signal handler that records a login."""

from typing import Any

from django.contrib.auth.models import User
from django.http import HttpRequest

from webapp.accounts.models import OpenSession
from webapp.core.clock import now

AUTHENTICATED_AT = "authenticated_at"
LONGEST_BROWSER = 200


def session_note(request: HttpRequest | None, user: User, **_others: Any) -> None:
    """Record the browser of a login and the time of its authentication."""
    if request is None:
        return
    instant = now()
    request.session[AUTHENTICATED_AT] = instant.timestamp()
    request.session.set_expiry(None)  # the default instead of a visitor's expiry
    request.session.save()
    OpenSession.objects.update_or_create(
        session_key=request.session.session_key,
        defaults={
            "user": user,
            "address": address_of(request),
            "browser": request.headers.get("User-Agent", "")[:LONGEST_BROWSER],
            "began_at": instant,
            "seen_at": instant,
        },
    )


def address_of(request: HttpRequest) -> str:
    """Return the client address of a request."""
    return str(request.META.get("REMOTE_ADDR", ""))[:64]
