"""The gateway's application: ``/v1/`` for clients; requests go through tunnels to endpoints.

A request needs no database: keys and deployments are looked up in a snapshot. It goes to the
replica that has the beginning of its conversation in its cache, unless others are less busy; one
that is not there yet is waited for. It is tried again, on another replica
or a new one, as long as nothing of its answer has arrived, and then at the fall-backs that its
deployment names. The header ``x-slipway-model`` and the answer's ``model`` say which one answered.
"""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from runners.jobspec.base import parse_json
from runners.jobspec.serve import key_hash
from runners.shared import tunnel as protocol
from runners.shared.event_streams import HEARTBEAT_SECONDS
from webapp.core.clock import now
from webapp.core.problems import Receive, Scope, Send
from webapp.deployments.states import DeploymentState
from webapp.gateway.cards import MODELS, Cards
from webapp.gateway.exchange import Bodies, ClientGoneError, Exchange
from webapp.gateway.journal import Journal, OpenAnswer
from webapp.gateway.key_limits import Limits
from webapp.gateway.refusals import Refusal, event_of_body
from webapp.gateway.routes import Key, Route, Routes, Target
from webapp.gateway.tunnels import HostTunnels, Tunnel, TunnelError, TunnelResponse, Tunnels
from webapp.gateway.usage import HEADER, UsageComments, used_of

HEALTH = "/v1/health"
MODEL_HEADER = "x-slipway-model"  # name of the deployment that answered
ANSWERED = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/messages/count_tokens", "/v1/embeddings", "/v1/rerank"),
)
WAKE_SECONDS = 2.0  # between two wakes that one request asks for
USUAL_LOAD_SECONDS = 30.0  # of a model that was never loaded, for Retry-After
LOOK_SECONDS = 1.0  # at the snapshot, while a request waits
START_SECONDS = 5.0  # until the first request knows the routes
NEW_SECONDS = 3.0  # until a key or a deployment that was made just now is known
MOST_STRANGERS = 64  # requests without a known key that wait for that; further ones do not
MOST_NEW_NAMES = 8  # requests of one key that wait for a deployment that was made just now
MOST_AHEAD = 2  # requests that a replica may have more than the least busy one
PREFIX_LENGTH = 1024  # of a prompt that says which replica has it in its cache
MOST_REQUESTS = 4000  # at the same time, of one gateway
MOST_REPEATS = 1  # of a request that may have reached an engine: it may be what ends it
MOST_ANSWER_BYTES = 64 * 1024**2  # of an answer that is no stream
NOT_SENT = frozenset({protocol.NO_ENDPOINT, protocol.REFUSED, protocol.BUSY})
FALL_BACK = frozenset({429, 500, 502, 503, 504})  # full, failed or not to be loaded
SILENT = frozenset({protocol.NO_ENDPOINT, protocol.REFUSED})  # nothing listens on the host
CLIENT_GONE = 499  # nginx's number: the client left before the head of its answer
PASSED_HEADERS = (b"accept", b"content-type", b"anthropic-version", b"anthropic-beta")
KEPT_HEADERS = frozenset(  # of an endpoint's answer: it is served from the site's own origin
    {b"content-type", b"content-length", b"cache-control", b"retry-after", b"x-accel-buffering"}
)
LARGE_BODY_BYTES = 64 * 1024  # parsed in a thread, so that others' answers go on
log = structlog.get_logger(__name__)


class ModelRequest(NamedTuple):
    """What a request asks for: its body, and what the gateway reads of it."""

    body: bytes
    model: str  # as it was sent
    is_streamed: bool
    conversation: bytes = b""  # a digest of how it begins
    renamed: bool = False  # the body names another model than ``model``

    def body_for(self, route: Route) -> bytes:
        """Return the body with the name that the endpoints of a deployment have for the model."""
        is_name = self.model in {route.name, *route.aliases}
        name = route.name if is_name else self.model.partition("/")[2]
        if name == self.model and not self.renamed:
            return self.body
        return json.dumps({**parse_json(self.body), "model": name}).encode()

    def to(self, asked: Route, route: Route) -> "ModelRequest":
        """Return the request to the deployment that was asked for, or to one of its fall-backs."""
        return self if asked is route else self._replace(model=route.name, renamed=True)


class Sent(NamedTuple):
    """A request on its way to the deployment that it asks for, or to a fall-back of that one.

    ``counted`` holds the count of the deployment that is asked now.
    """

    exchange: Exchange
    key: Key
    route: Route
    asked: ModelRequest
    counted: ExitStack


class Opened(NamedTuple):
    """The head of an answer, with the replica and the deployment that it comes from."""

    response: TunnelResponse
    target: Target
    route: Route


class Tries:
    """What one request met at a deployment, and how long it may wait there.

    ``is_last``: no other deployment can answer, so that one without an able replica is waited for.
    """

    def __init__(self, deadline: float, *, is_last: bool) -> None:
        self.deadline, self.is_last = deadline, is_last
        self.failed: set[str] = set()  # attempts since the last look at the snapshot
        self.away: set[str] = set()  # attempts that take no requests
        self._unready: set[str] = set()

    def unready(self, attempt_id: str) -> None:
        """Note that an endpoint answered that it is ending or loading: away at the second time."""
        if attempt_id in self._unready:
            self.away.add(attempt_id)
        self._unready.add(attempt_id)

    def able(self, connected: Sequence[Target]) -> list[Target]:
        """Return the replicas that may be asked now."""
        left_out = self.failed if self.is_last else self.failed | self.away
        return [each for each in connected if each.attempt_id not in left_out]

    def are_over(self, connected: Sequence[Target]) -> bool:
        """Return whether others are to answer, as none of the connected replicas does."""
        return not self.is_last and all(each.attempt_id in self.away for each in connected)


class Gateway:
    """One gateway: its routes, limits, tunnels and journal; the first request starts it."""

    def __init__(
        self,
        journal_folder: Path,
        *,
        routes: Routes | None = None,
        tunnels: HostTunnels | None = None,
    ) -> None:
        self.routes = routes or Routes()
        self.tunnels = tunnels or Tunnels()
        self._cards = Cards(self.tunnels)
        self.journal = Journal(journal_folder)
        self.routes.while_read = self.journal.settling
        self.limits = Limits()
        self._bodies = Bodies()
        self._running: Counter[str] = Counter()  # requests by replica
        self._num_requests = 0
        self._renewing: Counter[str] = Counter()  # requests that wait for new routes, by key
        self._is_started = False

    async def start(self) -> None:
        """Read routes and count usage from now on; return once the routes are known.

        Raises:
            Refusal: the database does not answer.
        """
        if not self._is_started:
            self._is_started = True
            self.routes.start()
            self.journal.start()
        if not self.routes.is_known:
            await self.routes.change(START_SECONDS)
        if not self.routes.is_known:
            words = "The gateway does not know its routes yet: its database does not answer."
            raise Refusal(503, words, "starting", {"retry-after": "5"})

    def stop(self) -> None:
        """End the threads; what was answered is counted."""
        if self._is_started:
            self.routes.stop()
            self.journal.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        exchange = Exchange(scope, receive, send, self._bodies)
        self._num_requests += 1
        try:
            await self._answer(exchange)
        except ClientGoneError:
            return
        except Refusal as refusal:
            await exchange.refuse(refusal)
        except Exception:
            log.exception("request failed at the gateway", path=exchange.path, request=exchange.id)
            words = f"The gateway failed; its log has the request {exchange.id}."
            await exchange.refuse(Refusal(500, words, "internal_error"))
        finally:
            self._num_requests -= 1
            exchange.end()

    async def _answer(self, exchange: Exchange) -> None:
        if exchange.path == HEALTH:
            await exchange.send_json({"status": "ok"})
            return
        await self.start()
        if self._num_requests > MOST_REQUESTS:
            words = f"{MOST_REQUESTS} requests are open at this gateway; try again shortly."
            raise Refusal(503, words, "busy", {"retry-after": "1"})
        key = await self._key_of(exchange)
        if exchange.path == MODELS or exchange.path.startswith(f"{MODELS}/"):
            await self._list(exchange, key)
            return
        if exchange.path not in ANSWERED:
            words = f"There is no {exchange.path[:200]} here; there is {', '.join(ANSWERED)}."
            raise Refusal(404, words, "not_found")
        if exchange.method != "POST":
            words = f"{exchange.path} takes POST, not {exchange.method[:20]}."
            raise Refusal(405, words, "method_not_allowed", {"allow": "POST"})
        asked = await _read(exchange)
        route = await self._route_of(key, asked.model)
        key = await self._key_of(exchange)  # with what it has used, and may, by now
        pending = self.journal.pending_tokens
        with self.limits.held(key, pending) as headers:
            exchange.answer_headers = dict(headers)
            working = self._forward(exchange, key, route, asked)
            await self._unless_over(exchange, key, working)

    async def _key_of(self, exchange: Exchange) -> Key:
        """Return the key that a request was sent with, also one that was made just now.

        Raises:
            Refusal: there is none, or it is not valid.
        """
        digest = key_hash(exchange.secret) if exchange.secret else ""
        if digest and digest not in self.routes.snapshot.keys:
            await self._renewed("", MOST_STRANGERS)
        key = self.routes.snapshot.keys.get(digest)
        if key is None or (key.expires_at is not None and key.expires_at <= now()):
            words = "A valid key is needed: Authorization: Bearer KEY. A team makes keys on its "
            words += "page Deployments."
            raise Refusal(401, words, "invalid_api_key", {"www-authenticate": "Bearer"})
        return key

    async def _renewed(self, key_id: str, most: int) -> None:
        """Wait for what the database says from now on, unless so many with a key ("": none) do."""
        if self._renewing[key_id] >= most:
            return
        self._renewing[key_id] += 1
        try:
            await self.routes.renewed(NEW_SECONDS)
        finally:
            self._renewing[key_id] -= 1
            self._renewing += Counter()  # without the zeros

    async def _route_of(self, key: Key, name: str) -> Route:
        """Return the deployment that a key opens, by its name, an alias, or with an adapter's.

        Raises:
            Refusal: there is none.
        """
        route = self.routes.snapshot.route_of(key, name)
        if route is None:
            await self._renewed(key.id, MOST_NEW_NAMES)
            route = self.routes.snapshot.route_of(key, name)
        if route is None or not key.opens(route.name):
            names = [each.name for each in self.routes.snapshot.routes_of(key)]
            known = f"it has {', '.join(names)}"[:500] if names else "it has none yet"
            words = f"This key has no model {name[:120]!r}; {known}."
            raise Refusal(404, words, "model_not_found")
        return route

    async def _list(self, exchange: Exchange, key: Key) -> None:
        name = exchange.path.removeprefix(MODELS).strip("/")
        routes = [await self._route_of(key, name)] if name else self.routes.snapshot.routes_of(key)
        cards = await self._cards.of(routes)
        if not name:
            await exchange.send_json({"object": "list", "data": cards})
            return
        card = next((each for each in cards if each["id"] == name), None)
        if card is None:
            raise Refusal(404, f"There is no model {name[:120]!r}.", "model_not_found")
        await exchange.send_json(card)

    # One request

    async def _forward(
        self, exchange: Exchange, key: Key, route: Route, asked: ModelRequest
    ) -> None:
        """Send a request to a replica and its answer to the client; keep what it used."""
        kept = self.journal.begin(key.id, route.id)
        status, is_cut = CLIENT_GONE, True
        sent = Sent(exchange, key, route, asked, ExitStack())
        try:
            found = await self._first(sent)
            response, target, status = found.response, found.target, found.response.status
            kept.move(found.route.id)
            exchange.answer_headers |= {MODEL_HEADER: found.route.name}
            with self._at(target):
                try:
                    kept.note(used_of(response.headers))
                    is_cut = not await self._pass_on(exchange, response, kept)
                finally:
                    await response.close()
        except Refusal as refusal:
            status, is_cut = refusal.status, False
            raise
        except Exception:
            status = int(HTTPStatus.INTERNAL_SERVER_ERROR)
            raise
        finally:
            sent.counted.close()
            kept.end(status, is_cut=is_cut)
        await exchange.finish()

    async def _unless_over(
        self, exchange: Exchange, key: Key, work: Coroutine[Any, Any, None]
    ) -> None:
        """Do the work; cancel it if the client disconnects, or its key is revoked, before.

        Raises:
            Refusal: the key was revoked.
        """
        working = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(exchange.gone())
        revoked = asyncio.ensure_future(self.routes.key_gone(key.id))
        waiting: Sequence[asyncio.Future[None]] = (working, gone, revoked)
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            is_revoked = revoked.done() and not working.done()
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.wait(waiting)
        if is_revoked:
            raise Refusal(401, "The key was revoked.", "invalid_api_key")
        if not working.cancelled():
            working.result()

    async def _first(self, sent: Sent) -> Opened:
        """Return the head of the answer; meanwhile the reader of a stream gets heartbeats.

        Raises:
            Refusal: no replica answers within the time that the request is held.
        """
        opening = asyncio.ensure_future(self._any_opened(sent))
        timeout = HEARTBEAT_SECONDS if sent.asked.is_streamed else None
        try:
            while True:
                await asyncio.wait((opening,), timeout=timeout)
                if opening.done():
                    return opening.result()
                await sent.exchange.heartbeat()
        except asyncio.CancelledError:
            opening.cancel()
            await asyncio.wait((opening,))
            if not opening.cancelled() and opening.exception() is None:
                await opening.result().response.close()
            raise

    async def _any_opened(self, sent: Sent) -> Opened:
        """Return the head of an answer of a deployment, or of the first fall-back that has one.

        All of them together hold the request as long as one may. One whose replicas do not take
        it is waited for only if none of those after it can answer.

        Raises:
            Refusal: none answers; it says why the one that was asked for did not.
        """
        route, counted = sent.route, sent.counted
        deadline = asyncio.get_running_loop().time() + _hold_seconds(sent.exchange, sent.key)
        able = self.routes.snapshot.with_fallbacks(sent.key, route)
        first: Refusal | None = None
        for number, each in enumerate(able, 1):
            counted.close()
            counted.enter_context(self.routes.count(each))
            tries = Tries(deadline, is_last=not any(map(_can_come, able[number:])))
            try:
                opened = await self._opened(sent.exchange, each, sent.asked.to(route, each), tries)
            except Refusal as refusal:
                if each is route and refusal.status not in FALL_BACK:
                    raise
                first = first or refusal
                continue
            if len(able) == 1 or opened.response.status not in FALL_BACK:
                return opened
            await opened.response.close()
            first = first or _as_refusal(opened)
        raise first or Refusal(503, f"{route.name} does not answer.", "unreachable")

    async def _opened(
        self, exchange: Exchange, route: Route, asked: ModelRequest, tries: Tries
    ) -> Opened:
        loop = asyncio.get_running_loop()
        num_repeats = 0
        while True:
            target = await self._target(route, tries, asked.conversation)
            tunnel = self.tunnels.of(target.host_id)
            if tunnel is None:
                continue
            try:
                response = await self._requested(tunnel, target, exchange, asked.body_for(route))
            except TunnelError as error:
                tries.failed.add(target.attempt_id)
                if error.code in NOT_SENT:
                    tries.away.add(target.attempt_id)
                num_repeats += error.code not in NOT_SENT
                if num_repeats > MOST_REPEATS:
                    words = f"No replica of {route.name} answered: {error} Try again."
                    again = {"retry-after": "1"}
                    raise Refusal(502, words, "unreachable", again) from None
                continue
            if response.status != HTTPStatus.SERVICE_UNAVAILABLE or loop.time() >= tries.deadline:
                return Opened(response, target, route)
            await response.close()  # it is ending or loading: another one, or itself again
            tries.unready(target.attempt_id)
            await self.routes.change(LOOK_SECONDS)

    async def _requested(
        self, tunnel: Tunnel, target: Target, exchange: Exchange, body: bytes
    ) -> TunnelResponse:
        """Return the head of a replica's answer; it is noted whether the replica takes requests.

        Raises:
            TunnelError: there is none.
        """
        headers = _headers_for(exchange, target)
        with self._at(target):  # a report of its use has the note as well
            try:
                response = await tunnel.request(
                    target.attempt_id, "POST", exchange.path, headers, body
                )
            except TunnelError as error:
                if error.code in SILENT:
                    self.routes.meet(target.replica_id, is_silent=True)
                raise
            self.routes.meet(target.replica_id, is_silent=False)
            return response

    @contextmanager
    def _at(self, target: Target) -> Iterator[None]:
        """Count a request at a replica while the block runs."""
        self._running[target.replica_id] += 1
        try:
            with self.routes.use(target.replica_id):
                yield
        finally:
            self._running[target.replica_id] -= 1
            if not self._running[target.replica_id]:
                del self._running[target.replica_id]

    def _chosen(self, ready: Sequence[Target], conversation: bytes) -> Target:
        """Return the replica that a conversation prefers, whose cache has its beginning.

        That is the same one as long as the replicas are the same (rendezvous hashing), unless it
        has ``MOST_AHEAD`` more requests than the least busy one.
        """
        least = min(self._running[each.replica_id] for each in ready)
        able = [each for each in ready if self._running[each.replica_id] <= least + MOST_AHEAD]
        return max(able, key=lambda each: sha256(conversation + each.replica_id.encode()).digest())

    async def _target(self, route: Route, tries: Tries, conversation: bytes) -> Target:
        """Return a replica for a request; wake the deployment and wait for it if there is none.

        Raises:
            Refusal: it cannot be woken, or not within the time that the request is held.
        """
        loop = asyncio.get_running_loop()
        wake_at = loop.time()
        while True:
            current = self.routes.snapshot.routes.get((route.team_id, route.name))
            if current is None or current.id != route.id:
                raise Refusal(404, f"{route.name} was deleted.", "model_not_found")
            connected = [each for each in current.targets if self.tunnels.of(each.host_id)]
            if tries.are_over(connected) and current.targets:
                raise _unreachable(current, is_connected=bool(connected))
            if ready := tries.able(connected):
                return self._chosen(ready, conversation)
            _check_can_come(current)
            left = tries.deadline - loop.time()
            to_go = current.seconds_to_go or current.load_seconds
            if left <= 0 and current.targets:
                raise _unreachable(current, is_connected=bool(connected))
            if not current.targets and loop.time() >= wake_at:
                self.routes.wake(current.id)
                wake_at = loop.time() + WAKE_SECONDS
            if left <= 0 or (not current.targets and to_go is not None and to_go > left + 1):
                raise _loading(current)
            tries.failed.clear()  # after a look at the next snapshot each may be tried again
            await self.routes.change(min(max(left, 0.0), LOOK_SECONDS))

    async def _pass_on(
        self, exchange: Exchange, response: TunnelResponse, kept: OpenAnswer
    ) -> bool:
        """Send an answer on; return whether it came to its end.

        Raises:
            Refusal: it is no stream, and broke off.
        """
        is_stream = any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in response.headers
        )
        if not is_stream:
            await self._pass_whole(exchange, response)
            return True
        if not exchange.has_begun:
            await exchange.begin(response.status, _client_headers(response))
        comments = UsageComments()
        try:
            async for chunk in response.chunks():
                shown = comments.feed(chunk)
                kept.note(comments.used)
                if shown:
                    await exchange.pass_on(shown)
            if rest := comments.rest():
                await exchange.pass_on(rest)
        except TunnelError as error:
            broken = Refusal(502, f"The answer broke off: {error}", "lost")
            await exchange.pass_on(broken.event(exchange.path))
            return False
        return True

    async def _pass_whole(self, exchange: Exchange, response: TunnelResponse) -> None:
        """Send an answer that is no stream, once it is whole.

        Raises:
            Refusal: it broke off.
        """
        try:
            body = bytearray()
            async for chunk in response.chunks():
                body += chunk
                if len(body) > MOST_ANSWER_BYTES:
                    words = f"The answer is larger than {MOST_ANSWER_BYTES // 1024**2} MiB."
                    raise Refusal(502, words, "too_large")
        except TunnelError as error:
            raise Refusal(502, f"The answer broke off: {error}", "lost") from None
        if exchange.has_begun:  # by heartbeats: only an error is no stream
            await exchange.pass_on(event_of_body(exchange.path, bytes(body)))
            return
        await exchange.begin(response.status, _client_headers(response))
        await exchange.pass_on(bytes(body))


def _check_can_come(route: Route) -> None:
    """Refuse a request for a deployment that no request wakes now.

    Raises:
        Refusal: it is paused, or failed a moment ago.
    """
    if route.state == DeploymentState.PAUSED:
        raise Refusal(503, f"{route.name} is paused by its team.", "paused")
    wait = (route.next_try_at - now()).total_seconds() if route.next_try_at else 0.0
    if route.state == DeploymentState.FAILING and wait > 0:
        words = f"{route.name} could not be started: {route.problem}"
        raise Refusal(503, words, "failing", {"retry-after": str(math.ceil(wait))})


def _can_come(route: Route) -> bool:
    """Return whether a deployment answers, or can be woken to."""
    try:
        _check_can_come(route)
    except Refusal:
        return bool(route.targets)
    return True


def _loading(route: Route) -> Refusal:
    seconds = route.seconds_to_go or route.load_seconds or USUAL_LOAD_SECONDS
    words = f"{route.name} is being loaded"
    if route.load_seconds is not None:
        words += f"; it takes about {math.ceil(seconds)} s more"
    again = {"retry-after": str(max(1, math.ceil(seconds)))}
    return Refusal(503, f"{words}. Try again then.", "loading", again)


def _unreachable(route: Route, *, is_connected: bool) -> Refusal:
    words = f"The host of {route.name} is not connected to this gateway."
    if is_connected:
        words = f"The host of {route.name} is connected, but no replica takes requests there now."
    return Refusal(503, words, "unreachable", {"retry-after": "5"})


def _as_refusal(opened: Opened) -> Refusal:
    """Return what an endpoint refused, whose body is left unread."""
    status = opened.response.status
    again = {
        name.decode().lower(): value.decode("latin-1")
        for name, value in opened.response.headers
        if name.lower() == b"retry-after"
    }
    words = f"{opened.route.name} answered {status}, and none of its fall-backs answers."
    return Refusal(status, words, "upstream", again)


def _client_headers(response: TunnelResponse) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer that its client gets."""
    return [each for each in response.headers if each[0].lower() in KEPT_HEADERS]


def _headers_for(exchange: Exchange, target: Target) -> list[tuple[bytes, bytes]]:
    passed = [
        (name, exchange.headers[name]) for name in PASSED_HEADERS if name in exchange.headers
    ]
    own = {
        b"authorization": f"Bearer {target.key}".encode(),
        b"x-request-id": exchange.id.encode(),
        HEADER: b"1",
    }
    return [*passed, *own.items()]


def _hold_seconds(exchange: Exchange, key: Key) -> float:
    """Return how long a request waits for a model: as its key says, less by ``Prefer: wait``."""
    for part in exchange.header("prefer").split(","):
        name, _, value = part.strip().partition("=")
        if name.lower() == "wait" and value.strip().isdecimal():
            return min(float(value), key.hold_seconds)
    return key.hold_seconds


async def _read(exchange: Exchange) -> ModelRequest:
    """Return what a request asks for.

    Raises:
        Refusal: the body is not a JSON object that names a model.
        ClientGoneError: the client disconnected.
    """
    body = await exchange.body()
    if len(body) > LARGE_BODY_BYTES:
        return await asyncio.to_thread(_request_of, body)
    return _request_of(body)


def _request_of(body: bytes) -> ModelRequest:
    try:
        document = parse_json(body)
    except ValueError as error:
        words = f"The body is not JSON: {str(error)[:200]}. Send one JSON object in UTF-8."
        raise Refusal(400, words, "invalid_json") from None
    if not isinstance(document, dict):
        raise Refusal(400, "The body is not a JSON object.", "invalid_json")
    model = document.get("model")
    if not isinstance(model, str) or not model:
        raise Refusal(400, "model is missing: name a deployment.", "model_not_found")
    return ModelRequest(body, model, document.get("stream") is True, _beginning(document))


def _beginning(document: dict[str, Any]) -> bytes:
    """Return a digest of how a conversation begins: its tools, instructions and first message."""
    begun: list[Any] = [document.get(name) for name in ("tools", "system", "instructions")]
    for name in ("messages", "input", "prompt"):
        value = document.get(name)
        if not isinstance(value, list):
            begun.append(str(value)[:PREFIX_LENGTH])
            continue
        roles = [each.get("role") if isinstance(each, dict) else "" for each in value]
        begun.append(value[: roles.index("user") + 1 if "user" in roles else 1])
    return sha256(json.dumps(begun).encode()).digest()
