"""Keeps a session open while it is used: half a day after the last request it is over."""

from collections.abc import Callable

from django.http import HttpRequest, HttpResponse

from webapp.accounts.session_signals import AUTHENTICATED_AT
from webapp.accounts.sessions import SEEN_EVERY, session_seen
from webapp.core.clock import now

SEEN_AT = "seen_at"


class SessionInUse:
    """Moves a session's end on, with one write in ten minutes."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Answer, then note that the session is in use."""
        response = self.get_response(request)
        session = request.session
        if not session.accessed or session.session_key is None:
            return response
        began = session.get(AUTHENTICATED_AT)
        instant = now().timestamp()
        if began and instant - session.get(SEEN_AT, began) >= SEEN_EVERY.total_seconds():
            session[SEEN_AT] = instant
            session_seen(session.session_key)
        return response
