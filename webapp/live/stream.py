"""Live events: publish, and stream to browsers."""

import asyncio
import contextlib
import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import redis
import redis.asyncio
import structlog
from django.apps import apps
from django.conf import settings
from django.contrib.auth.models import AnonymousUser, User
from django.core import signing
from django.core.signing import BadSignature
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.cache import patch_vary_headers
from django.utils.html import format_html

from runners.host.redis_access import client_options
from runners.shared.timing import STREAM_PING_SECONDS
from webapp.accounts.models import TeamOwned, team_ids_of
from webapp.core.outages import Breaker, connection
from webapp.core.problems import (
    BusyProblem,
    Problem,
    Receive,
    Scope,
    Send,
    TooLargeProblem,
    UnauthorizedProblem,
    closing,
    send_problem,
)

# ---------------------------------------------------------------------------
# Publish changes to open pages, whose stream is opened by a signed ticket.
# ---------------------------------------------------------------------------


STREAM = "live"
MAX_ENTRIES = 20_000
MAX_BYTES = 64 * 1024**2  # of the stream in Redis
CHECK_BYTES = 1024**2  # published by one process between two looks at the stream's size
log = structlog.get_logger(__name__)
_breaker = Breaker()


class ByteLimit:
    """Keeps the stream in Redis below ``MAX_BYTES``, which a number of entries does not."""

    def __init__(self) -> None:
        self._unchecked_bytes = 0

    def add(self, client: redis.Redis, num_bytes: int) -> None:
        """Count published bytes; from time to time, remove the oldest entries of a long stream."""
        self._unchecked_bytes += num_bytes
        if self._unchecked_bytes < CHECK_BYTES:
            return
        self._unchecked_bytes = 0
        while (used := client.memory_usage(STREAM, samples=0) or 0) > MAX_BYTES:
            length = client.xlen(STREAM)
            client.xtrim(STREAM, maxlen=length * 3 * MAX_BYTES // (4 * used), approximate=False)
            if not length:
                return


_byte_limit = ByteLimit()


def publish(topic: str, event: str, data: Mapping[str, Any]) -> bool:
    """Send one event to the viewers of ``topic``; return whether Redis accepted it."""
    return publish_all([(topic, event, data)])


def publish_all(messages: Iterable[tuple[str, str, Mapping[str, Any]]]) -> bool:
    """Send several events in one round trip; return whether Redis accepted them."""
    if _breaker.is_open():
        return False
    try:
        client, num_bytes = connection(), 0
        pipe = client.pipeline(transaction=False)
        for topic, event, data in messages:
            text = json.dumps(data, separators=(",", ":"))
            num_bytes += len(text)
            pipe.xadd(
                STREAM,
                {"t": topic, "e": event, "d": text},
                maxlen=MAX_ENTRIES,
                approximate=True,
            )
        pipe.execute()
        _byte_limit.add(client, num_bytes)
    except (redis.RedisError, OSError) as error:
        _breaker.trip()
        log.debug("live messages dropped", cause=str(error))
        return False
    return True


def jobs_topic(team_id: str) -> str:
    """Return the topic of a team's job list."""
    return f"jobs:{team_id}"


def hosts_topic(team_id: str) -> str:
    """Return the topic of a team's host list."""
    return f"hosts:{team_id}"


# Tickets for the live stream: signed, for given topics, valid for an hour, not stored.


SALT = "slipway.live"
TICKET_SECONDS = LIFETIME_SECONDS = 3600  # to open a stream, and of a stream
KEY = re.compile(r"[0-9A-Za-z]{1,64}")
_OWNED = frozenset(
    {"job", "host", "plan", "observedserver"}
)  # team-owned models whose pages are live
_PER_TEAM = {"jobs": jobs_topic, "hosts": hosts_topic}


def ticket_for(user: User | AnonymousUser, topics: Iterable[str]) -> str:
    """Return a ticket for those of ``topics`` that the user may see.

    Topics: ``job:<id>``, ``host:<id>``, ``plan:<id>``, ``observedserver:<id>``, and ``jobs`` and
    ``hosts`` for the lists of the user's teams.
    """
    allowed = sorted({name for topic in topics for name in _allowed(user, topic.strip())})
    return signing.TimestampSigner(salt=SALT).sign_object({"u": user.pk, "t": allowed})


def _allowed(user: User | AnonymousUser, topic: str) -> list[str]:
    if topic in _PER_TEAM and user.is_authenticated:
        return [_PER_TEAM[topic](team_id) for team_id in team_ids_of(user)]
    kind, _, key = topic.partition(":")
    if kind not in _OWNED or not KEY.fullmatch(key):
        return []
    model = next(each for each in owned_models() if each._meta.model_name == kind)
    if not model.objects.visible_to(user).filter(pk=key).exists():
        return []
    return [topic]


def owned_models() -> Iterator[type[TeamOwned]]:
    """Yield the models whose rows belong to a team."""
    return (model for model in apps.get_models() if issubclass(model, TeamOwned))


def read_ticket(ticket: str) -> tuple[int, tuple[str, ...]]:
    """Return the user id and topics of a ticket.

    Raises:
        BadSignature: the ticket was not signed here, was changed, or is older than an hour.
    """
    signer = signing.TimestampSigner(salt=SALT)
    body = signer.unsign_object(ticket, max_age=TICKET_SECONDS)
    return body["u"], tuple(body["t"])


# Helpers for pages with live regions: the stream's attributes, and partial responses.


RENDERING_SECONDS = 15.0  # maximum time from rendering a page to opening its stream


def live_context(request: HttpRequest, topics: Sequence[str]) -> dict[str, str]:
    """Return the attributes of the element that opens the page's live stream.

    ``since`` is the event id to resume after, so that changes during the rendering, transfer and
    script start of the page are replayed to it.
    """
    since = f"{int((time.time() - RENDERING_SECONDS) * 1000)}-0"
    attributes = format_html(
        'data-live-topics="{}" data-live-ticket="{}" data-live-since="{}"',
        ",".join(topics), ticket_for(request.user, topics), since,
    )  # fmt: skip
    return {"live_attributes": attributes}


def page_or_regions(
    request: HttpRequest, page: str, regions: str, context: Mapping[str, Any]
) -> HttpResponse:
    """Return the page, or only its live regions for htmx and live.js."""
    is_partial = request.headers.get("HX-Request") == "true"
    response = render(request, regions if is_partial else page, dict(context))
    patch_vary_headers(response, ["HX-Request"])
    response["Cache-Control"] = "no-store"
    return response


# ---------------------------------------------------------------------------
# ASGI application of ``/live/``: server-sent events, fanned out from a Redis stream.
# ---------------------------------------------------------------------------


RING_SECONDS = 60.0
RING_BYTES = 32 * 1024**2  # of the frames that a process keeps for viewers who come back
MAX_WAITING = 64
MAX_WAITING_BYTES = 1024**2
BLOCK_MS = 5000
COUNT = 1000
RETRY_SECONDS = 1.0
SOCKET_SECONDS = 10.0
REVOKE = "revoke:"

STALE = b"event: stale\ndata: {}\n\n"
RESYNC = b"event: resync\ndata: {}\n\n"
BYE = b"retry: 1500\nevent: bye\ndata: {}\n\n"

StreamId = tuple[int, int]


class Frame(NamedTuple):
    """One encoded server-sent event, with its stream id, topic and arrival time."""

    id: StreamId
    topic: str
    data: bytes
    at: float


def parse_id(text: str) -> StreamId | None:
    """Return a stream id as a tuple that sorts as in Redis, or None if it is invalid."""
    milliseconds, _, number = text.partition("-")
    if not (milliseconds.isdecimal() and number.isdecimal()):
        return None
    return int(milliseconds), int(number)


def frame_bytes(entry_id: str, event: str, data: str) -> bytes:
    """Return an encoded server-sent event."""
    return f"id: {entry_id}\nevent: {event}\ndata: {data}\n\n".encode()


class Viewer:
    """One open stream: its queue of frames, and whether it is closing."""

    def __init__(self, user_id: int, topics: Iterable[str]) -> None:
        self.user_id = user_id
        self.topics = frozenset(topics)
        self.is_closing = False
        self._waiting: list[bytes] = []
        self._num_bytes = 0
        self._news = asyncio.Event()

    def put(self, data: bytes) -> None:
        """Queue a frame; replace a full queue by a resync event."""
        is_full = self._num_bytes + len(data) > MAX_WAITING_BYTES and self._waiting
        if is_full or len(self._waiting) >= MAX_WAITING:
            self._waiting, self._num_bytes = [RESYNC], len(RESYNC)
        self._waiting.append(data)
        self._num_bytes += len(data)
        self._news.set()

    def close(self) -> None:
        """End the stream after the queued frames."""
        self.is_closing = True
        self._news.set()

    async def wait(self) -> None:
        """Wait for a frame or for the end of the stream."""
        await self._news.wait()

    def take(self) -> bytes:
        """Return and clear all queued frames as one piece."""
        data, self._waiting, self._num_bytes = b"".join(self._waiting), [], 0
        self._news.clear()
        return data


class Hub:
    """Reads the stream and forwards every frame to the viewers of its topic."""

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.viewers: set[Viewer] = set()
        self._url = url
        self._clock = clock
        self._ring: deque[Frame] = deque()
        self._ring_bytes = 0
        self._last: StreamId | None = None
        self._floor: StreamId | None = None  # the ring has every frame after it
        self.is_reading = asyncio.Event()  # set once the end of the stream is known
        self._is_stale = False
        self._is_closing = False
        self._reader: asyncio.Task[None] | None = None

    def join(self, viewer: Viewer, last_id: str = "") -> None:
        """Add a viewer; replay the frames after ``last_id`` if they are in the ring."""
        if self._reader is None or self._reader.done():
            self._reader = asyncio.get_running_loop().create_task(self._read())
        self.viewers.add(viewer)
        if last_id:
            self._resume(viewer, parse_id(last_id))
        if self._is_stale:
            viewer.put(STALE)
        if self._is_closing:
            viewer.close()

    def leave(self, viewer: Viewer) -> None:
        """Remove a viewer."""
        self.viewers.discard(viewer)

    def close(self) -> None:
        """End every stream, before the process stops."""
        self._is_closing = True
        for viewer in self.viewers:
            viewer.close()
        if self._reader is not None:
            self._reader.cancel()

    def _resume(self, viewer: Viewer, since: StreamId | None) -> None:
        missed = [frame for frame in self._ring if since is not None and frame.id > since]
        wanted = [frame.data for frame in missed if frame.topic in viewer.topics]
        is_known = since is not None and self._floor is not None and since >= self._floor
        if not is_known or len(wanted) > MAX_WAITING:
            viewer.put(RESYNC)
            return
        for data in wanted:
            viewer.put(data)

    async def _read(self) -> None:
        """Read the stream endlessly; without Redis, send the viewers a stale event."""
        client = redis.asyncio.Redis.from_url(
            self._url,
            decode_responses=True,
            socket_timeout=SOCKET_SECONDS,
            socket_connect_timeout=1.0,
            **client_options(self._url, settings.REDIS_CA),
        )
        try:
            while True:
                try:
                    await self._read_once(client)
                except (redis.RedisError, OSError) as error:
                    self._mark_stale(error)
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            await client.aclose()

    async def _read_once(self, client: redis.asyncio.Redis) -> None:
        if self._last is None:
            newest = await client.xrevrange(STREAM, count=1)
            self._last = self._floor = parse_id(str(newest[0][0])) if newest else (0, 0)
            self.is_reading.set()
        start = "{}-{}".format(*(self._last or (0, 0)))
        reply = await client.xread({STREAM: start}, count=COUNT, block=BLOCK_MS)
        self._is_stale = False
        for entry_id, fields in _entries(reply):
            self._dispatch(entry_id, fields)
        self._drop_old()

    def _dispatch(self, entry_id: str, fields: dict[str, str]) -> None:
        number = parse_id(entry_id)
        topic = fields.get("t", "")
        if number is None:
            return
        self._last = number
        if topic.startswith(REVOKE):
            user_id = topic.removeprefix(REVOKE)
            for revoked in self.viewers:
                if str(revoked.user_id) == user_id:
                    revoked.close()
            return
        data = frame_bytes(entry_id, fields.get("e", "message"), fields.get("d", "{}"))
        self._ring.append(Frame(number, topic, data, self._clock()))
        self._ring_bytes += len(data)
        for viewer in self.viewers:
            if topic in viewer.topics:
                viewer.put(data)

    def _drop_old(self) -> None:
        while self._ring and (
            self._ring_bytes > RING_BYTES or self._clock() - self._ring[0].at > RING_SECONDS
        ):
            frame = self._ring.popleft()
            self._floor = frame.id
            self._ring_bytes -= len(frame.data)

    def _mark_stale(self, error: Exception) -> None:
        if self._is_stale:
            return
        self._is_stale = True
        log.warning("live stream is away", cause=str(error))
        for viewer in self.viewers:
            viewer.put(STALE)


def _entries(reply: Any) -> list[tuple[str, dict[str, str]]]:  # noqa: ANN401 (RESP2 or RESP3)
    """Return the entries of a reply for one stream."""
    if isinstance(reply, dict):
        return [entry for parts in reply.values() for part in parts for entry in part]
    return [entry for _, entries in reply or [] for entry in entries]


PREFIX = "/live/"
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
TICKET_HEADER = b"live-ticket"  # not in the address, which proxies log
TICKET_REFUSED = (
    "ticket_refused",
    "The header Live-Ticket is missing, changed or older than an hour. Load the page again.",
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
    if problem := _fault_of(scope):
        await send_problem(closing(receive, send), problem, [(b"allow", b"GET")])
        return
    try:
        user_id, topics = read_ticket(_header(scope, TICKET_HEADER))
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
    hub.join(viewer, _header(scope, b"last-event-id"))
    try:
        await _serve(viewer, receive, send)
    finally:
        hub.leave(viewer)


def _fault_of(scope: Scope) -> Problem | None:
    """Return what is wrong with a request of another form than an event source's."""
    if scope["method"] != "GET":
        problem = Problem("method_not_allowed", f"{PREFIX} takes GET alone.")
        problem.status = HTTPStatus.METHOD_NOT_ALLOWED
        return problem
    headers = dict(scope.get("headers", ()))
    if b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0":
        return TooLargeProblem("too_large", f"A request to {PREFIX} has no body.")
    return None


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


def _header(scope: Scope, wanted: bytes) -> str:
    """Return the first header of a name, or "" if the request has none."""
    for name, value in scope.get("headers", []):
        if name == wanted:
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
            async with asyncio.timeout(STREAM_PING_SECONDS):
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
