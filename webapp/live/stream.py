"""The ASGI branch ``/live/``: server-sent events without a thread or a query per viewer.

``GET /live/?ticket=…`` with an optional ``Last-Event-ID``. The ticket was signed when the
page was rendered, with its permissions checked; here only the signature and its age count.
Streams have a cap per person and per process; whoever finds none free polls until one is.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from django.conf import settings
from django.core.signing import BadSignature

from webapp.api.problems import raw_problem
from webapp.core.problems import BusyProblem, Problem, UnauthorizedProblem
from webapp.live.hub import BYE, Hub, Viewer
from webapp.live.tickets import LIFETIME_SECONDS, read_ticket

PREFIX = "/live/"
PING_SECONDS = 15.0
PING = b": ping\n\n"
OPENING = b"retry: 3000\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
MOST_PER_PERSON = 6
MOST_PER_PROCESS = 500
RETRY_AFTER_SECONDS = 15
TICKET_REFUSED = (
    "ticket_refused",
    "The ticket is missing, changed or older than an hour. Load the page again.",
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_hubs: dict[asyncio.AbstractEventLoop, Hub] = {}


def hub_of_this_loop() -> Hub:
    """Return the running loop's hub, made on first use."""
    loop = asyncio.get_running_loop()
    for other in [known for known in _hubs if known.is_closed()]:
        del _hubs[other]
    return _hubs.setdefault(loop, Hub(settings.REDIS_URL))


def close_all() -> None:
    """Let every open stream of this process end with a farewell; safe in a signal handler."""
    for loop, hub in list(_hubs.items()):
        loop.call_soon_threadsafe(hub.close)


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer one request below ``/live/``."""
    query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
    try:
        user_id, topics = read_ticket(query.get("ticket", [""])[0])
    except BadSignature:
        await _refuse(send, UnauthorizedProblem(*TICKET_REFUSED))
        return
    hub = hub_of_this_loop()
    try:
        check_room(hub, user_id)
    except BusyProblem as problem:
        await _refuse(send, problem)
        return
    viewer = Viewer(user_id, topics)
    hub.join(viewer, _last_event_id(scope))
    try:
        await _serve(viewer, receive, send)
    finally:
        hub.leave(viewer)


def check_room(hub: Hub, user_id: int) -> None:
    """Refuse one stream more than a person, or the process, may have open.

    Raises:
        BusyProblem: with the cap that is reached; the page polls and comes back.
    """
    num_own = sum(viewer.user_id == user_id for viewer in hub.viewers)
    if num_own >= MOST_PER_PERSON:
        code, cap = "too_many_streams", f"One person may have {MOST_PER_PERSON} live pages open"
    elif len(hub.viewers) >= MOST_PER_PROCESS:
        code, cap = "streams_full", f"The server keeps {MOST_PER_PROCESS} live pages open"
    else:
        return
    sentence = f"{cap}; this one asks for its figures every few seconds until another closes."
    raise BusyProblem(code, sentence, retry_after_seconds=RETRY_AFTER_SECONDS)


def _last_event_id(scope: Scope) -> str:
    for name, value in scope.get("headers", []):
        if name == b"last-event-id":
            return str(value.decode("latin-1"))
    return ""


async def _refuse(send: Send, problem: Problem) -> None:
    status, headers, body = raw_problem(problem)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _serve(viewer: Viewer, receive: Receive, send: Send) -> None:
    """Pump until the viewer goes, the ticket's hour is over, or the process stops."""
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    pump = asyncio.create_task(_pump(viewer, send))
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (pump, gone):
            task.cancel()
        await asyncio.gather(pump, gone, return_exceptions=True)


async def _pump(viewer: Viewer, send: Send) -> None:
    ends_at = time.monotonic() + LIFETIME_SECONDS
    await _send(send, OPENING)
    while not viewer.is_closing and time.monotonic() < ends_at:
        try:
            async with asyncio.timeout(PING_SECONDS):
                await viewer.wait()
        except TimeoutError:
            await _send(send, PING)
            continue
        await _send(send, viewer.take())
    await _send(send, BYE, is_last=True)


async def _send(send: Send, data: bytes, *, is_last: bool = False) -> None:
    if data or is_last:
        await send({"type": "http.response.body", "body": data, "more_body": not is_last})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
