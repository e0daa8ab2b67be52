"""ASGI middleware that rejects request bodies over their URL's limit, before reading them.

Django reads a whole body, into memory or a temporary file, before any view checks the caller, so
the limit applies before Django. It depends on the URL and on whether the request has a session
cookie or a credential.
"""

import re
from collections.abc import Callable, MutableMapping
from typing import Any

from django.conf import settings

from runners.jobspec.data import MAX_UPLOAD_BYTES
from webapp.core.asgi_messages import CLOSE, Application, Receive, Scope, Send, send_answer

MEBIBYTE = 1024**2
ANONYMOUS_BYTES = MEBIBYTE  # enough for login and enrolment
DEFAULT_BYTES = 8 * MEBIBYTE
PART_BYTES = 17 * MEBIBYTE  # one part of an artefact has at most 16 MiB
UPLOAD_BYTES = MAX_UPLOAD_BYTES + 8 * MEBIBYTE  # the page itself checks the exact limit
LARGER = (
    ("PUT", re.compile(r"/api/v1/attempts/[^/]+/artefacts/"), PART_BYTES),
    ("POST", re.compile(r"/data/upload/$"), UPLOAD_BYTES),
    ("POST", re.compile(r"/plans/[^/]+/(upload|edit/[^/]+)/$"), UPLOAD_BYTES),
)


def limit_of(scope: Scope) -> int:
    """Return the maximum body size of a request in bytes."""
    if not _has_credentials(scope):
        return ANONYMOUS_BYTES
    for method, pattern, limit in LARGER:
        if scope["method"] == method and pattern.match(scope["path"]):
            return limit
    return DEFAULT_BYTES


def limited(application: Application, policy: Callable[[Send], Send]) -> Application:
    """Return the application with the limit; ``policy`` adds headers to error responses."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await application(scope, receive, send)
            return
        limit = limit_of(scope)
        if _content_length(scope) > limit:
            await _refuse(scope, policy(send), limit)
            return
        request = Counted(receive, send, limit)
        await application(scope, request.receive, request.send)
        if request.is_too_large and not request.is_answered:
            await _refuse(scope, policy(send), limit)

    return guarded


class Counted:
    """One request with a counted body; over the limit it looks like a client disconnect."""

    def __init__(self, receive: Receive, send: Send, limit: int) -> None:
        self._receive, self._send, self._limit = receive, send, limit
        self._received = 0
        self.is_too_large = False
        self.is_answered = False

    async def receive(self) -> MutableMapping[str, Any]:
        """Return the next part of the body."""
        message = await self._receive()
        self._received += len(message.get("body", b""))
        self.is_too_large = self.is_too_large or self._received > self._limit
        return {"type": "http.disconnect"} if self.is_too_large else message

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send a part of the response."""
        self.is_answered = True
        await self._send(message)


def _content_length(scope: Scope) -> int:
    length = dict(scope.get("headers", ())).get(b"content-length", b"0")
    return int(length) if length.isdigit() else 0


def _has_credentials(scope: Scope) -> bool:
    cookie = f"{settings.SESSION_COOKIE_NAME}=".encode()
    return any(
        name == b"authorization" or (name == b"cookie" and cookie in value)
        for name, value in scope.get("headers", ())
    )


async def _refuse(scope: Scope, send: Send, limit: int) -> None:
    from webapp.api.problems import send_problem
    from webapp.core.problems import TooLargeProblem

    who = "" if _has_credentials(scope) else " Log in first to send more."
    sentence = f"A request to {scope['path'][:200]} has at most {limit} bytes.{who}"
    if scope["path"].startswith("/api/"):
        await send_problem(send, TooLargeProblem("too_large", sentence), CLOSE)
    else:
        text = (b"content-type", b"text/plain; charset=utf-8")
        await send_answer(send, 413, [text, *CLOSE], sentence.encode())
