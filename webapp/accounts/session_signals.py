"""What is noted when somebody logs in."""

from typing import Any

from django.contrib.auth.models import User
from django.http import HttpRequest

from webapp.accounts.models import OpenSession
from webapp.core.clock import now

AUTHENTICATED_AT = "authenticated_at"
LONGEST_BROWSER = 200


def session_note(request: HttpRequest | None, user: User, **_others: Any) -> None:
    """Write down in which browser a person is logged in, and when the password was shown."""
    if request is None:
        return
    instant = now()
    request.session[AUTHENTICATED_AT] = instant.timestamp()
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
    """Return the network address that a request came from."""
    return str(request.META.get("REMOTE_ADDR", ""))[:64]
