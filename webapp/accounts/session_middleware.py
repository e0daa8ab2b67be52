"""Session expiry: a session ends half a day after its last request.

If the database rejects the update, the page is still served. The update is retried after a minute,
because each try may wait for a lock timeout.
"""

from collections.abc import Callable

import structlog
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse

from webapp.accounts.session_signals import AUTHENTICATED_AT
from webapp.accounts.sessions import SEEN_EVERY, session_touch
from webapp.core.clock import now

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
