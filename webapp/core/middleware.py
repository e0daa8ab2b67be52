"""Middleware: names of the site, body limits, deadlines, security headers."""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from hashlib import sha256
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import structlog
from csp.middleware import CSPMiddleware
from django.conf import settings
from django.contrib import messages
from django.core.exceptions import DisallowedHost, PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, HttpResponseRedirect
from django.http.request import UnreadablePostError
from django.middleware.gzip import GZipMiddleware
from django.shortcuts import render
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.views import defaults
from servestatic.utils import parse_accept_encoding

from planner.specs.units import MIB
from webapp.core.bodies import ANONYMOUS_BYTES, largest_file, limit_at
from webapp.core.pace import Limit, Pace
from webapp.core.problems import (
    Application,
    BusyProblem,
    Problem,
    QueryProblem,
    Receive,
    Scope,
    Send,
    closing,
    send_answer,
)

# ---------------------------------------------------------------------------
# Middleware: problems become messages, unreadable text is rejected, pages are compressed.
# ---------------------------------------------------------------------------


API = "/api/"  # parses its bodies itself and has no forms
GetResponse = Callable[[HttpRequest], HttpResponse]


# Safe redirects to URLs from requests: only to pages of this site.


def is_address_of_site(request: HttpRequest, address: str) -> bool:
    """Return whether an address is a path or an absolute URL of this site."""
    if not url_has_allowed_host_and_scheme(address, allowed_hosts={request.get_host()}):
        return False
    return urlsplit(address).path.startswith("/")


def redirect_to_own(request: HttpRequest, address: str, otherwise: str) -> HttpResponseRedirect:
    """Return a redirect to an address of this site, or to ``otherwise`` for any other.

    ``django.shortcuts.redirect`` is not used: it takes text such as ``0`` for a view name.
    """
    return HttpResponseRedirect(address if is_address_of_site(request, address) else otherwise)


# Compression of pages and JSON with mitigations against BREACH.
#
# BREACH derives a secret from the length of a compressed page: the attacker makes the victim's
# browser open the page with guesses in the URL and observes the size of the responses.
# Mitigations:
#
# - Django masks the CSRF token in every response, and pads the response by up to 100 random bytes.
# - Cross-site requests get uncompressed responses.
# - A page that shows a secret is marked (``uncompressed``) and never compressed.
# - Streamed responses are not compressed: server-sent events must not be buffered, and artefacts
#   are compressed where it is worth it.
#
# Static files bypass this: they contain no secrets and are compressed at collection.


OTHER_SITES = ("cross-site", "same-site")  # another host of the same domain is not trusted
MARK = "_shows_a_secret"
Response = TypeVar("Response", bound=HttpResponseBase)


def uncompressed(response: Response) -> Response:
    """Mark a response that shows a secret, so that it is never compressed."""
    setattr(response, MARK, True)
    return response


class CompressionMiddleware(GZipMiddleware):
    """Django's gzip middleware with random padding, for responses that may be compressed."""

    def process_response(
        self, request: HttpRequest, response: HttpResponseBase
    ) -> HttpResponseBase:
        """Return the response, compressed if the client accepts it and it may be compressed."""
        if response.streaming or hasattr(response, MARK) or not _may_compress(request):
            return response
        return super().process_response(request, response)


def _may_compress(request: HttpRequest) -> bool:
    accepted = parse_accept_encoding(request.headers.get("Accept-Encoding", ""))
    return "gzip" in accepted and request.headers.get("Sec-Fetch-Site") not in OTHER_SITES


# Middleware that explains what Django answers without a word: a bare 400 to a name that is not the
# site's, and a redirect without end behind a proxy whose headers are not trusted.


LOGGED = Limit("One address", 1 / 60, 2)  # lines in the log; anybody can send such requests
log = structlog.get_logger(__name__)


class AddressMiddleware:
    """Answers 400 with the cause to requests under another name, or from an unknown TLS proxy."""

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response
        self._lines = Pace()

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Refuse the request, or call the next handler."""
        try:
            request.get_host()
        except DisallowedHost:
            sent = (request.headers.get("Host") or request.META["SERVER_NAME"])[:200]
            problem = Problem("unknown_host", UNKNOWN_HOST.format(host=sent))
            return self._refused(request, problem, problem.detail)
        if words := _proxy_fault(request):
            line = f"{words} The request came from {request.META.get('REMOTE_ADDR')}."
            return self._refused(request, Problem("untrusted_proxy", words), line)
        if _has_forwarded_plainly(request):
            self._log(request, NO_PROTO.format(peer=request.META.get("REMOTE_ADDR")))
        return self.get_response(request)

    def _refused(self, request: HttpRequest, problem: Problem, line: str) -> HttpResponse:
        from webapp.core.problems import problem_response  # here: as in ``_refused`` below

        self._log(request, line)
        if request.path_info.startswith(API):
            return problem_response(problem)
        text = "text/plain; charset=utf-8"
        return HttpResponse(problem.detail, status=problem.status, content_type=text)

    def _log(self, request: HttpRequest, line: str) -> None:
        if not self._lines.count(LOGGED, f"{request.META.get('REMOTE_ADDR')}"):
            log.warning(line.encode("ascii", "backslashreplace").decode())


UNKNOWN_HOST = (
    "The Host header is {host!r}, a name under which this site does not answer. Use the site's "
    "own address. If this is one of its names, its operator adds it to SLIPWAY_ALLOWED_HOSTS and "
    "starts the site again; `up --host 0.0.0.0` answers at every address of the machine."
)
UNTRUSTED = (
    "X-Forwarded-Proto says that this request came over TLS, but from a proxy that is not "
    "trusted. The operator of this site sets FORWARDED_ALLOW_IPS to the proxy's address, which is "
    "in the site's web log, and starts the site again."
)
ODD_PROTO = (
    "X-Forwarded-Proto is {proto!r}; a proxy sends `https` alone. Correct the proxy's "
    "configuration."
)
NO_PROTO = (
    "A request that the proxy at {peer} forwarded without X-Forwarded-Proto is sent on to https. "
    "If browsers are sent on without end, let the proxy send X-Forwarded-Proto: https."
)


def _is_sent_on_to_tls(request: HttpRequest) -> bool:
    """Return whether Django's middleware answers the request by a redirect to https."""
    path = request.path.lstrip("/")
    is_exempt = any(re.search(each, path) for each in settings.SECURE_REDIRECT_EXEMPT)
    return bool(settings.SECURE_SSL_REDIRECT) and not request.is_secure() and not is_exempt


def _proxy_fault(request: HttpRequest) -> str:
    """Return why a request that came over TLS does not count as secure; "" if it needs no word."""
    proto = request.headers.get("X-Forwarded-Proto", "")
    if not proto.strip().lower().startswith("https") or not _is_sent_on_to_tls(request):
        return ""
    return UNTRUSTED if proto.strip() == "https" else ODD_PROTO.format(proto=proto[:100])


def _has_forwarded_plainly(request: HttpRequest) -> bool:
    headers = request.headers
    is_forwarded = "X-Forwarded-For" in headers and "X-Forwarded-Proto" not in headers
    return is_forwarded and _is_sent_on_to_tls(request)


# Middleware that rejects text that databases cannot store.
#
# PostgreSQL cannot store NUL in text, and no database can store a lone surrogate. This middleware
# checks URLs, queries and forms; ``webapp.core.problems`` checks JSON bodies.


UNKEPT = re.compile("[\x00\ud800-\udfff]")
FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")
LONGEST_NAME = 40


class ReadableTextMiddleware:
    """Answers 400 with the name of the field; ignores cookies with such text."""

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Delete unreadable cookies, and call the next handler."""
        for name in [name for name, value in request.COOKIES.items() if UNKEPT.search(value)]:
            del request.COOKIES[name]
        return self.get_response(request)

    def process_view(
        self, request: HttpRequest, _view: object, _args: object, _kwargs: object
    ) -> HttpResponse | None:
        """Return the 400 response, or None for a readable request."""
        try:
            where = next((where for where, text in _texts(request) if UNKEPT.search(text)), None)
        except UnreadablePostError:
            return None  # the client disconnected
        return None if where is None else _refused(request, where)


def _texts(request: HttpRequest) -> Iterator[tuple[str, str]]:
    """Yield the location and the text of every text in a request."""
    yield "The address", request.path_info
    fields = [("The query", request.GET)]
    is_api = request.path_info.startswith(API)
    if request.method == "POST" and request.content_type in FORMS and not is_api:
        fields.append(("The form", request.POST))
    for place, values in fields:
        for name, texts in values.lists():
            yield f"The name of a field of {place.lower()}", name
            for text in texts:
                yield f"Field “{name[:LONGEST_NAME]}” of {place.lower()}", str(text)
    if len(fields) > 1:
        for name, files in request.FILES.lists():
            for file in files:
                yield f"The name of the file in the field “{name[:LONGEST_NAME]}”", file.name or ""


def _refused(request: HttpRequest, where: str) -> HttpResponse:
    from webapp.core.problems import problem_response  # here: webapp.api imports webapp.core

    detail = (
        f"{where} holds a NUL character or half of a surrogate pair, which databases cannot "
        "store. Remove the character and send the request again."
    )
    problem = Problem("unreadable_text", detail)
    if request.path_info.startswith(API):
        return problem_response(problem)
    return render(request, "400.html", {"detail": detail}, status=problem.status)


# Request attributes of other middlewares that reference the request.
REFERRING = ("user", "auser", "_messages", "htmx", "csp_nonce")


class ReleaseMiddleware:
    """Frees a request after its response.

    Several middlewares set request attributes that reference the request. Such a cycle, with the
    body and all loaded rows, lives until a collection of the oldest generation: after a burst of
    requests this uses much memory and fragments the heap.
    """

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Call the next handler, and break the request's cycles unless the response streams."""
        response = self.get_response(request)
        if not response.streaming:
            for name in REFERRING:
                vars(request).pop(name, None)
        return response


class ProblemMiddleware:
    """Turns a ``Problem`` of a view into a page or a message; the API has its own handler."""

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Call the next handler."""
        return self.get_response(request)

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        """Return the response to a problem; None for other exceptions."""
        if not isinstance(exception, Problem):
            return None
        if exception.status == HTTPStatus.NOT_FOUND:
            return defaults.page_not_found(request, Http404(exception.detail))
        if exception.status == HTTPStatus.FORBIDDEN:
            return defaults.permission_denied(request, PermissionDenied(exception.detail))
        if isinstance(exception, QueryProblem):
            context = {"detail": exception.detail, "heading": exception.title}
            return render(request, "400.html", context, status=exception.status)
        messages.warning(request, exception.detail)
        before = request.headers.get("Referer", "")
        is_other = urlsplit(before).path != request.path
        return redirect_to_own(request, before if is_other else "", reverse("home"))


# ---------------------------------------------------------------------------
# ASGI middleware: body limits, one request per credential at a time, security headers.
# ---------------------------------------------------------------------------


# ASGI middleware that rejects request bodies over their URL's limit, before reading them.
#
# Django reads a whole body, into memory or a temporary file, before any view checks the caller, so
# the limit applies before Django. It depends on the view (``webapp.core.bodies``) and on who sends
# the request: the session or credential is looked up once the body exceeds what a stranger may
# send, so an invented cookie gives nothing.


# Bodies whose sender is not known are held in memory together within these limits, and have to
# arrive in time. A stranger is asked for his session or credential only when one is reached.
FREE_BYTES = 16 * 1024  # of each body: a login, a heartbeat
STRANGERS_BYTES = 32 * MIB
ADDRESS_BYTES = 8 * MIB
BODY_SECONDS = 30.0
BODY_RETRY_SECONDS = 5

IsKnown = Callable[[Scope], Awaitable[bool]]


class SlowProblem(Problem):
    """The body did not arrive in time."""

    status = 408
    title = "The request took too long to arrive"


TOO_SLOW = SlowProblem(
    "too_slow",
    f"The body of this request was not there after {BODY_SECONDS:g} s. Send it at once, or log in "
    "first.",
)
TOO_MANY_BODIES = BusyProblem(
    "too_many_bodies",
    f"The server reads at most {STRANGERS_BYTES // MIB} MiB at one time from senders that it "
    f"does not know, and {ADDRESS_BYTES // MIB} MiB from one address. Try again soon, or log "
    "in first.",
    retry_after_seconds=BODY_RETRY_SECONDS,
)


class StrangersBodies:
    """The bytes of open requests whose senders are unknown: in all, and by address."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._of_address: Counter[str] = Counter()

    def take(self, address: str, num_bytes: int) -> bool:
        """Count some bytes, unless they are too many together with the others."""
        is_over = self.num_bytes + num_bytes > STRANGERS_BYTES
        if is_over or self._of_address[address] + num_bytes > ADDRESS_BYTES:
            return False
        self.num_bytes += num_bytes
        self._of_address[address] += num_bytes
        return True

    def give_back(self, address: str, num_bytes: int) -> None:
        """Stop counting some bytes."""
        self.num_bytes -= num_bytes
        self._of_address[address] -= num_bytes
        if not self._of_address[address]:
            del self._of_address[address]


def limited(
    application: Application, policy: Callable[[Send], Send], is_known: IsKnown
) -> Application:
    """Return the application with the request-body size limit; ``policy`` adds error headers."""
    bodies = StrangersBodies()

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await application(scope, receive, send)
            return
        request = SizeLimitedRequest(scope, receive, send, is_known, bodies)
        length = dict(scope.get("headers", ())).get(b"content-length", b"0")
        if length.isdigit() and await request.exceeds(int(length)):
            await _refuse(scope, closing(receive, policy(send)), request.limit)
            return
        try:
            await application(scope, request.receive, request.send)
        finally:
            request.end()
        if request.is_cut_off and not request.is_answered:
            answer = closing(receive, policy(send))
            await _refuse(scope, answer, request.limit, request.problem)

    return guarded


class SizeLimitedRequest:
    """One request with a counted body; over a limit it looks like a client disconnect."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        is_known: IsKnown,
        bodies: StrangersBodies,
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._is_known, self._bodies = is_known, bodies
        self._address = str((scope.get("client") or ("",))[0])
        self._received = self._held = 0
        self._deadline = asyncio.get_running_loop().time() + BODY_SECONDS
        self._is_looked_up = self._is_of_known = self._is_whole = False
        self.limit = ANONYMOUS_BYTES
        self.is_cut_off = False
        self.problem: Problem | None = None  # None: the body is too large
        self.is_answered = False

    async def exceeds(self, num_bytes: int) -> bool:
        """Return whether a body is too large; look up who sends it if it is more than a few."""
        return num_bytes > self.limit and (not await self._look_up() or num_bytes > self.limit)

    async def receive(self) -> MutableMapping[str, Any]:
        """Return the next part of the body; what comes after the answer is dropped."""
        if self.is_answered and not self.is_cut_off:
            return {**await self._receive(), "body": b""}
        message = await self._next_part()
        self._received += len(message.get("body", b""))
        if not self.is_cut_off and await self.exceeds(self._received):
            self.is_cut_off = True
        elif not self.is_cut_off and not await self._hold():
            self.is_cut_off, self.problem = True, TOO_MANY_BODIES
        return {"type": "http.disconnect"} if self.is_cut_off else message

    def end(self) -> None:
        """Stop counting the body of a request that is over."""
        self._bodies.give_back(self._address, self._held)
        self._held = 0

    async def _next_part(self) -> MutableMapping[str, Any]:
        """Return what the client sends next; a stranger's body has to be whole by a deadline."""
        if self._is_whole or self._is_of_known:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            if await self._look_up():
                return await self._receive()
            self.is_cut_off, self.problem = True, TOO_SLOW
            return {"type": "http.disconnect"}
        self._is_whole = not message.get("more_body", False)
        return message

    async def _hold(self) -> bool:
        """Count what a stranger sent among all that strangers send; False if it is too much."""
        added = self._received - FREE_BYTES - self._held
        if self._is_of_known or added <= 0:
            return True
        if self._bodies.take(self._address, added):
            self._held += added
            return True
        return await self._look_up()

    async def _look_up(self) -> bool:
        """Return whether the sender is known, whose limits are then others."""
        if not self._is_looked_up and _has_credentials(self._scope):
            self._is_looked_up = True
            if await self._is_known(self._scope):
                self._is_of_known = True
                self.limit = limit_at(self._scope["method"], self._scope["path"])
                self.end()
        return self._is_of_known

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send a part of the response; one to a body that was cut off gives way to the refusal."""
        if self.is_cut_off and not self.is_answered:
            return
        self.is_answered = True
        await self._send(message)


def _has_credentials(scope: Scope) -> bool:
    cookie = f"{settings.SESSION_COOKIE_NAME}=".encode()
    return any(
        name == b"authorization" or (name == b"cookie" and cookie in value)
        for name, value in scope.get("headers", ())
    )


async def _refuse(scope: Scope, send: Send, limit: int, problem: Problem | None = None) -> None:
    """Answer a request whose body is not read on, being too large or for another problem."""
    from webapp.core.problems import TooLargeProblem, UnauthorizedProblem, send_problem

    who = " Log in first to send more." if limit == ANONYMOUS_BYTES else ""
    file_bytes = limit > ANONYMOUS_BYTES and largest_file(scope["method"], scope["path"])
    file = f", and a file in it {file_bytes // MIB} MiB" if file_bytes else ""
    sentence = f"A request to {scope['path'][:200]} has at most {limit} bytes{file}.{who}"
    if limit == ANONYMOUS_BYTES and any(name == b"authorization" for name, _ in scope["headers"]):
        # A host whose secret was replaced keeps its data for 401, and would give them up for 413.
        sentence += " This credential is unknown, replaced or revoked."
        unknown = UnauthorizedProblem("not_authenticated", sentence)
        await send_problem(send, problem or unknown)
        return
    problem = problem or TooLargeProblem("too_large", sentence)
    if scope["path"].startswith("/api/"):
        await send_problem(send, problem)
    else:
        text = (b"content-type", b"text/plain; charset=utf-8")
        await send_answer(send, problem.status, [text], problem.detail.encode())


# ASGI middleware that serialises the requests of one credential.
#
# Django handles each request in its own thread. A host that sends many requests at once would
# occupy as many threads at the cost of other callers, without a gain of its own. The lock is held
# from the end of the request body to the start of the response, so that neither a slow upload nor
# a long download blocks the host's other requests.


MOST_UNANSWERED = 32  # requests per credential; a host's agent has four connections
RETRY_AFTER_SECONDS = 2


class CredentialLocks:
    """The lock and the number of open requests of one credential in one event loop."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.num_unanswered = 0


class SerializePerCredential:
    """An application that handles one request at a time per credential."""

    def __init__(self, application: Application, policy: Callable[[Send], Send]) -> None:
        self._application, self._policy = application, policy  # policy: adds headers to a 429
        self._turns: WeakValueDictionary[tuple[int, bytes], CredentialLocks] = (
            WeakValueDictionary()
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; a request without a credential needs no lock."""
        credential = _credential(scope)
        if not credential:
            await self._application(scope, receive, send)
            return
        key = (id(asyncio.get_running_loop()), sha256(credential).digest())
        turns = self._turns.setdefault(key, CredentialLocks())
        if turns.num_unanswered >= MOST_UNANSWERED:
            from webapp.core.problems import send_problem

            sentence = (
                f"More than {MOST_UNANSWERED} requests with this credential wait for their "
                "answers. Send the next ones when some are answered."
            )
            problem = BusyProblem(
                "too_many_at_once", sentence, retry_after_seconds=RETRY_AFTER_SECONDS
            )
            await send_problem(closing(receive, self._policy(send)), problem)
            return
        turn = _Turn(turns, receive, send)
        try:
            await self._application(scope, turn.receive, turn.send)
        finally:
            turn.end()


class _Turn:
    """One request: it holds the lock from the end of its body to the start of its response."""

    def __init__(self, turns: CredentialLocks, receive: Receive, send: Send) -> None:
        self._turns, self._receive, self._send = turns, receive, send
        self._is_held = self._is_over = False
        turns.num_unanswered += 1

    async def receive(self) -> Scope:
        """Return the next part of the body; acquire the lock before returning the last one."""
        message = await self._receive()
        if not message.get("more_body", False) and not self._is_held and not self._is_over:
            await self._turns.lock.acquire()
            self._is_held = True
        return message

    async def send(self, message: Scope) -> None:
        """Send a part of the response; the first one releases the lock."""
        self.end()
        await self._send(message)

    def end(self) -> None:
        """Release the lock for the next request of the credential."""
        if self._is_over:
            return
        if self._is_held:
            self._turns.lock.release()
        self._is_over = True
        self._turns.num_unanswered -= 1


def _credential(scope: Scope) -> bytes:
    return next(
        (bytes(value) for name, value in scope.get("headers", ()) if name == b"authorization"), b""
    )


# Content-Security-Policy and Permissions-Policy headers.
#
# One middleware sets both headers. It is the first, so that responses of other middlewares (files,
# errors, redirects to TLS) have them too.


# Browser features that no page uses. Only writing to the clipboard is allowed.
DENIED = (
    "accelerometer",
    "browsing-topics",
    "camera",
    "clipboard-read",
    "display-capture",
    "encrypted-media",
    "fullscreen",
    "gamepad",
    "geolocation",
    "gyroscope",
    "hid",
    "idle-detection",
    "local-fonts",
    "magnetometer",
    "microphone",
    "midi",
    "payment",
    "picture-in-picture",
    "publickey-credentials-get",
    "screen-wake-lock",
    "serial",
    "storage-access",
    "usb",
    "window-management",
    "xr-spatial-tracking",
)
PERMISSIONS_POLICY = ", ".join(["clipboard-write=(self)", *(f"{name}=()" for name in DENIED)])


class PoliciesMiddleware(CSPMiddleware):
    """Adds both policies to every response of Django."""

    def process_response(
        self, request: HttpRequest, response: HttpResponseBase
    ) -> HttpResponseBase:
        """Return the response with Content-Security-Policy and Permissions-Policy."""
        guarded: HttpResponseBase = super().process_response(request, response)
        guarded.headers.setdefault("Permissions-Policy", PERMISSIONS_POLICY)
        return guarded
