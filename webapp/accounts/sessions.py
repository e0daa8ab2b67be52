"""Sessions: their storage of secrets and CSRF, their expiry, and the page that ends them."""

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import structlog
from django.conf import settings
from django.contrib import messages
from django.contrib.auth import SESSION_KEY
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.db import DatabaseError, transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.middleware.csrf import CsrfViewMiddleware
from django.shortcuts import redirect, render
from django.utils.cache import patch_vary_headers
from django.views.decorators.http import require_GET, require_POST

from webapp.accounts.models import OpenSession
from webapp.core import vault
from webapp.core.clock import now
from webapp.plans.access import signed_in

SEEN_EVERY = timedelta(minutes=10)


def sessions_of(user: User) -> QuerySet[OpenSession]:
    """Return a user's open sessions, latest used first."""
    alive = Session.objects.filter(expire_date__gt=now()).values("session_key")
    return OpenSession.objects.filter(user=user, session_key__in=alive)


def sessions_end(chosen: QuerySet[OpenSession]) -> int:
    """End sessions at once; return their number."""
    with transaction.atomic():
        keys = list(chosen.values_list("session_key", flat=True))
        Session.objects.filter(session_key__in=keys).delete()
        OpenSession.objects.filter(session_key__in=keys).delete()
    return len(keys)


def session_touch(session_key: str) -> bool:
    """Record use of a session at most every ten minutes; return whether it was recorded."""
    instant = now()
    rows = OpenSession.objects.filter(session_key=session_key, seen_at__lte=instant - SEEN_EVERY)
    return bool(rows.update(seen_at=instant))


def sessions_forget_ended() -> int:
    """Delete expired and logged-out sessions; return the number of ``OpenSession`` rows."""
    Session.objects.filter(expire_date__lte=now()).delete()
    alive = Session.objects.values("session_key")
    return OpenSession.objects.exclude(session_key__in=alive).delete()[0]


# Secrets to be shown to one browser on a later page, encrypted in its session.
#
# Sessions are in the database and its backups; the encryption keys are not.


def session_secret_keep(request: HttpRequest, kind: str, owner_id: str, text: str) -> None:
    """Store an object's secret in the session, replacing the last one of its kind."""
    request.session[kind] = {owner_id: vault.seal(text)}


def session_secret_of(request: HttpRequest, kind: str, owner_id: str) -> str:
    """Return an object's secret from the session, or "" if there is none.

    The result is also "" if the encryption key is gone; the user can create a new secret.
    """
    sealed = (request.session.get(kind) or {}).get(owner_id, "")
    try:
        return vault.unseal(sealed) if sealed else ""
    except vault.VaultError:
        return ""


# Signal handler that records a login.


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


# Session expiry: a session ends half a day after its last request.
#
# If the database rejects the update, the page is still served. The update is retried after a
# minute, because each try may wait for a lock timeout.


SEEN_AT = "seen_at"
REST_SECONDS = 60.0
log = structlog.get_logger(__name__)


class SessionInUse:
    """Extends the session in use, with one write per ten minutes."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response
        self._rests_until = 0.0

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Call the next handler, then record that the session is in use."""
        response = self.get_response(request)
        session = request.session
        if not session.accessed or session.session_key is None:
            return response
        began = session.get(AUTHENTICATED_AT)
        instant = now().timestamp()
        is_due = began and instant - session.get(SEEN_AT, began) >= SEEN_EVERY.total_seconds()
        if is_due and instant >= self._rests_until and self._note(session.session_key):
            session[SEEN_AT] = instant
        return response

    def _note(self, session_key: str) -> bool:
        """Record that a session is in use; return whether it was stored."""
        try:
            session_touch(session_key)
        except DatabaseError:
            self._rests_until = now().timestamp() + REST_SECONDS
            log.warning("a session in use was not noted", exc_info=True)
            return False
        return True


# The page of a user's open sessions, with log-out of other browsers.


EVERY_OTHER = "others"


@require_GET
def session_list(request: HttpRequest) -> HttpResponse:
    """List the browsers in which the user is logged in."""
    open_here = list(sessions_of(signed_in(request)))
    context = {"open_sessions": open_here, "this_key": request.session.session_key}
    response = render(request, "accounts/sessions.html", context)
    response["Cache-Control"] = "no-store"
    return response


@require_POST
def session_end(request: HttpRequest) -> HttpResponse:
    """Log out one of the user's browsers, or all but this one."""
    rows = sessions_of(signed_in(request))
    chosen = request.POST.get("session", "")
    if chosen == EVERY_OTHER:
        rows = rows.exclude(session_key=request.session.session_key)
    else:
        rows = rows.filter(pk=chosen)
    if count := sessions_end(rows):
        messages.success(request, f"{count} browser{'s' if count > 1 else ''} logged out.")
    else:
        messages.warning(request, "None of your browsers was logged in under that name.")
    return redirect("sessions")


# Storage of the CSRF secret: in the session if logged in, else in a cookie.
#
# A visitor has it in a host-only cookie: a session per visitor would be a database row, and the
# login page must work while the database rejects writes.


COOKIE = "visitor"  # with the prefix "__Host-" behind TLS
SECRET = re.compile(r"[a-zA-Z0-9]{32}")


class CsrfMiddleware(CsrfViewMiddleware):
    """Django's CSRF protection, with a visitor's secret in a cookie."""

    def _get_secret(self, request: HttpRequest) -> str | None:
        if _is_logged_in(request):
            return super()._get_secret(request)  # type: ignore[misc,no-any-return] # not in stubs
        secret = request.COOKIES.get(_cookie(), "")
        return secret if SECRET.fullmatch(secret) else None

    def _set_csrf_cookie(self, request: HttpRequest, response: HttpResponseBase) -> None:
        if _is_logged_in(request):
            super()._set_csrf_cookie(request, response)  # type: ignore[misc] # not in stubs
            return
        response.set_cookie(
            _cookie(),
            request.META["CSRF_COOKIE"],
            secure=bool(settings.SESSION_COOKIE_SECURE),
            httponly=True,
            samesite="Lax",
        )
        patch_vary_headers(response, ("Cookie",))


def _cookie() -> str:
    return f"__Host-{COOKIE}" if settings.SESSION_COOKIE_SECURE else COOKIE


def _is_logged_in(request: HttpRequest) -> bool:
    return SESSION_KEY in request.session
