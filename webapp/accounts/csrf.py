"""Storage of the CSRF secret: in the session if logged in, else in a cookie.

A visitor has it in a host-only cookie: a session per visitor would be a database row, and the
login page must work while the database rejects writes.
"""

import re

from django.conf import settings
from django.contrib.auth import SESSION_KEY
from django.http import HttpRequest, HttpResponseBase
from django.middleware.csrf import CsrfViewMiddleware
from django.utils.cache import patch_vary_headers

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
