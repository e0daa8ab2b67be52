"""ASGI application of ``/live/``: server-sent events without a thread or a query per viewer.

``GET /live/?ticket=…`` with an optional ``Last-Event-ID``. The ticket was signed when the page was
rendered, after a permission check; here only its signature and age are verified. The number of
streams is limited per user and per process; a page over the limit polls until one is free.
"""

import asyncio
import contextlib
import time
from urllib.parse import parse_qs

from django.conf import settings
from django.core.signing import BadSignature

from webapp.api.problems import send_problem
from webapp.core.asgi_messages import Receive, Scope, Send
from webapp.core.problems import BusyProblem, UnauthorizedProblem
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

_hubs: dict[asyncio.AbstractEventLoop, Hub] = {}


def hub_of_this_loop() -> Hub:
    """Return the running event loop's hub, created on first use."""
    loop = asyncio.get_running_loop()
    for other in [each for each in _hubs if each.is_closed()]:
        del _hubs[other]
    return _hubs.setdefault(loop, Hub(settings.REDIS_URL))


def close_all() -> None:
    """End every open stream of this process with a bye event; safe in a signal handler."""
    for loop, hub in list(_hubs.items()):
        with contextlib.suppress(RuntimeError):  # a closed loop has no streams
            loop.call_soon_threadsafe(hub.close)


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer one request to ``/live/``."""
    query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
    try:
        user_id, topics = read_ticket(query.get("ticket", [""])[0])
    except BadSignature:
        await send_problem(send, UnauthorizedProblem(*TICKET_REFUSED))
        return
    hub = hub_of_this_loop()
    try:
        check_room(hub, user_id)
    except BusyProblem as problem:
        await send_problem(send, problem)
        return
    viewer = Viewer(user_id, topics)
    hub.join(viewer, _last_event_id(scope))
    try:
        await _serve(viewer, receive, send)
    finally:
        hub.leave(viewer)


def check_room(hub: Hub, user_id: int) -> None:
    """Check the limits of open streams per user and per process.

    Raises:
        BusyProblem: a limit is reached; the page polls and retries.
    """
    num_own = sum(viewer.user_id == user_id for viewer in hub.viewers)
    if num_own >= MOST_PER_PERSON:
        code, cap = "too_many_streams", f"One person may have {MOST_PER_PERSON} live pages open"
    elif len(hub.viewers) >= MOST_PER_PROCESS:
        code, cap = "streams_full", f"The server keeps {MOST_PER_PROCESS} live pages open"
    else:
        return
    sentence = f"{cap}; this page polls its figures every few seconds until another closes."
    raise BusyProblem(code, sentence, retry_after_seconds=RETRY_AFTER_SECONDS)


def _last_event_id(scope: Scope) -> str:
    for name, value in scope.get("headers", []):
        if name == b"last-event-id":
            return str(value.decode("latin-1"))
    return ""


async def _serve(viewer: Viewer, receive: Receive, send: Send) -> None:
    """Send frames until the client disconnects, the ticket expires, or the process stops."""
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    pump = asyncio.create_task(_pump(viewer, send))
    disconnect = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({pump, disconnect}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (pump, disconnect):
            task.cancel()
        await asyncio.gather(pump, disconnect, return_exceptions=True)


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
