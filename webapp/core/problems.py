"""Problems as problem+json and as pages: status, field, limit and way out."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from ninja import NinjaAPI, Schema
from ninja.errors import AuthenticationError, AuthorizationError, HttpError, ValidationError
from pydantic import ValidationError as PydanticError

from planner.specs.base import location_of

# ---------------------------------------------------------------------------
# Expected errors of services, with messages that a person or a host can act on.
#
# The API turns them into RFC 9457 problem documents, pages into messages.
# ---------------------------------------------------------------------------


REQUEST_ID = "X-Request-Id"  # header of every reply of the API


class Problem(Exception):  # noqa: N818 (RFC 9457 calls the document a problem)
    """An expected error with a stable ``code`` and a sentence that says what to do."""

    status = 400
    title = "The request cannot be carried out"

    def __init__(self, code: str, detail: str, **facts: object) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.facts = facts


class InvalidProblem(Problem):
    """The request is invalid."""

    status = 422
    title = "The request is not valid"


class QueryProblem(Problem):
    """A parameter in the address of a page that the page does not read; ``code`` names it."""

    title = "The address has a parameter that is not read"


class UnexpectedProblem(Problem):
    """The server failed: a fault of Slipway, not of the request."""

    status = 500
    title = "The server failed"


class UnauthorizedProblem(Problem):
    """The caller is not authenticated."""

    status = 401
    title = "Authentication is required"


class ForbiddenProblem(Problem):
    """The caller is not allowed to do this."""

    status = 403
    title = "The role does not allow this"


class ScopeProblem(ForbiddenProblem):
    """The access token does not allow this, whatever the role of its user."""

    title = "The token's scope does not allow this"


class CsrfProblem(ForbiddenProblem):
    """A session's request could come from another site's page."""

    title = "The request lacks a CSRF token"


class NotFoundProblem(Problem):
    """The object does not exist or is not visible to the caller."""

    status = 404
    title = "Nothing was found"


class ConflictProblem(Problem):
    """The current state does not allow the request."""

    status = 409
    title = "The current state does not allow this"


class MethodProblem(Problem):
    """The address exists and does not have this method."""

    status = 405
    title = "The address does not have this method"


class MediaTypeProblem(Problem):
    """The body has a media type that the operation does not read."""

    status = 415
    title = "The media type is not supported"


class TooLargeProblem(Problem):
    """The body exceeds the size limit."""

    status = 413
    title = "The body is too large"


class UnavailableProblem(Problem):
    """The database or the disk has failed; ``retry_after_seconds`` says when to retry."""

    status = 503
    title = "The server is temporarily unavailable"


class BusyProblem(Problem):
    """The server accepts no more now; ``retry_after_seconds`` says when to retry."""

    status = 429
    title = "Too many requests"


# ---------------------------------------------------------------------------
# Types of an ASGI application, and a helper that sends a whole response.
# ---------------------------------------------------------------------------


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

LINGER_SECONDS = 5.0


def closing(receive: Receive, send: Send) -> Send:
    """Return a ``send`` for a response before the request was read, which ends the connection.

    The server would read the body on without end. If it closed while a client or proxy still
    sends, their system would drop the response: nginx and Caddy would answer 502 in its place. So
    the response is whole at once, and the connection closes when they stopped, or after seconds.
    """

    async def guarded(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            await send({**message, "headers": [*message["headers"], (b"connection", b"close")]})
            return
        await send({**message, "more_body": True})
        if message.get("more_body", False):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b""})

    return guarded


async def send_answer(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Send a whole response with its content length."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


# ---------------------------------------------------------------------------
# RFC 9457: every error of the API is a problem document.
# ---------------------------------------------------------------------------


MEDIA_TYPE = "application/problem+json"
JSON_TYPE = "application/json"
BYTES_TYPE = "application/octet-stream"
MOST_FAULTS = 20  # listed per response


class FieldFault(Schema):
    """What is wrong with one field of a request."""

    field: str
    message: str


class ProblemDocument(Schema):
    """The body of every 4xx response and of a 503; what does not concern it is left out."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    field: str = ""
    errors: list[FieldFault] = []
    retry_after_seconds: int = 0
    needed_gpu_hours: float = 0.0
    rest_gpu_hours: float = 0.0


REFUSALS = dict.fromkeys((400, 401, 403, 404, 405, 409, 413, 422, 429, 503), ProblemDocument)


def bytes_in() -> dict[str, Any]:
    """Return the OpenAPI description of a binary request body."""
    return {"requestBody": {"content": _bytes(), "required": False}}


def bytes_out(description: str) -> dict[str, Any]:
    """Return the OpenAPI description of a binary response."""
    return {"responses": {200: {"description": description, "content": _bytes()}}}


def _bytes() -> dict[str, Any]:
    return {BYTES_TYPE: {"schema": {"type": "string", "format": "binary"}}}


def name_media_types(document: dict[str, Any]) -> None:
    """Set the media type of problem responses in the OpenAPI document; ninja does not."""
    operations = (each for path in document["paths"].values() for each in path.values())
    for operation in operations:
        for code in REFUSALS.keys() & operation["responses"].keys():
            answer = operation["responses"][code]
            answer["content"] = {MEDIA_TYPE: next(iter(answer["content"].values()))}


def problem_response(problem: Problem) -> JsonResponse:
    """Return the HTTP response of a problem."""
    body = {
        "type": f"urn:slipway:problem:{problem.code}",
        "title": problem.title,
        "status": problem.status,
        "detail": problem.detail,
        "code": problem.code,
        **problem.facts,
    }
    response = JsonResponse(body, status=problem.status, content_type=MEDIA_TYPE)
    if problem.status == UnauthorizedProblem.status:
        response["WWW-Authenticate"] = "Bearer"  # RFC 9110 §15.5.2: a 401 names the scheme
    if "retry_after_seconds" in problem.facts:
        response["Retry-After"] = str(problem.facts["retry_after_seconds"])
    return response


async def send_problem(send: Send, problem: Problem, more_headers: Headers = ()) -> None:
    """Send a problem from an ASGI application without Django."""
    response = problem_response(problem)
    response["Cache-Control"] = "no-store"
    headers = [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in response.items()
    ]
    await send_answer(send, response.status_code, [*headers, *more_headers], response.content)


def faults_of(error: PydanticError) -> list[dict[str, Any]]:
    """Return the validation errors of a message, field by field, without the values.

    The one exception is the ``tag`` by which a union's member was looked for, and not found.
    """
    faults = []
    for item in error.errors(include_url=False, include_input=False):
        fault: dict[str, Any] = {**item, "loc": location_of(item)}
        context = fault.pop("ctx", {})
        if item["type"] == "union_tag_invalid":
            fault["tag"] = str(context["tag"])
        faults.append(fault)
    return faults


def invalid(errors: list[dict[str, Any]]) -> InvalidProblem:
    """Return the problem that names the first invalid field and lists up to ``MOST_FAULTS``.

    A list of thousands of invalid values has as many faults, so the response is bounded.
    """
    named = [
        (".".join(map(str, error["loc"])), str(error["msg"]).removeprefix("Value error, "))
        for error in errors[:MOST_FAULTS]
    ]
    where, message = named[0]
    detail = f"The field {where or 'body'} is not valid: {message}."
    if len(errors) > MOST_FAULTS:
        detail += f" The first {MOST_FAULTS} of {len(errors):,} faults are listed."
    listed = [{"field": field, "message": message} for field, message in named]
    return InvalidProblem("invalid", detail, errors=listed)


def release_frames(error: BaseException) -> None:
    """Delete the tracebacks of a handled exception and of its causes and contexts.

    A traceback references its frames, and one of them often references the exception: a cycle that
    keeps the request and its body alive. A cycle through an error that a validator raised is never
    collected, because pydantic's error does not support garbage collection.
    """
    pending, visited = [error], set()
    while pending:
        current = pending.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        current.__traceback__ = None
        pending += [each for each in (current.__context__, current.__cause__) if each is not None]
        if isinstance(current, PydanticError):
            faults = current.errors(include_url=False, include_input=False)
            raised = [fault.get("ctx", {}).get("error") for fault in faults]
            pending += [each for each in raised if isinstance(each, BaseException)]


def not_authenticated() -> UnauthorizedProblem:
    """Return the problem of a request without a session or credential."""
    sentence = (
        "The request has no valid credential. Send an access token, which starts with slp_, as "
        "`Authorization: Bearer slp_…`, or log in; the agent of a host sends the credential of "
        "its enrolment."
    )
    return UnauthorizedProblem("not_authenticated", sentence)


def install(api: NinjaAPI) -> None:
    """Register handlers that answer every expected exception with a problem document."""

    @api.exception_handler(Problem)
    def on_problem(_request: HttpRequest, problem: Problem) -> HttpResponse:
        return problem_response(problem)

    @api.exception_handler(ValidationError)
    def on_invalid(_request: HttpRequest, error: ValidationError) -> HttpResponse:
        return problem_response(invalid(error.errors))

    @api.exception_handler(AuthenticationError)
    def on_unknown(_request: HttpRequest, _error: AuthenticationError) -> HttpResponse:
        return problem_response(not_authenticated())

    @api.exception_handler(AuthorizationError)
    def on_forbidden(_request: HttpRequest, error: AuthorizationError) -> HttpResponse:
        return problem_response(ForbiddenProblem("forbidden", str(error)))

    @api.exception_handler(PermissionDenied)
    def on_denied(_request: HttpRequest, error: PermissionDenied) -> HttpResponse:
        return problem_response(ForbiddenProblem("role_too_low", str(error)))

    @api.exception_handler(Http404)
    def on_missing(request: HttpRequest, _error: Http404) -> HttpResponse:
        route = request.resolver_match.kwargs if request.resolver_match else {}
        ids = ", ".join(f"{name} {str(value)[:80]!r}" for name, value in route.items())
        return problem_response(
            NotFoundProblem(
                "not_found",
                f"No object of your teams has this id{': ' * bool(ids)}{ids}. The id may be of "
                "another team, or the object is deleted.",
            )
        )

    @api.exception_handler(HttpError)
    def on_http_error(_request: HttpRequest, error: HttpError) -> HttpResponse:
        if isinstance(error.__cause__, Problem):  # of the parser, which ninja wraps
            return problem_response(error.__cause__)
        cause = f": {error.__cause__}." if isinstance(error.__cause__, ValueError) else "."
        problem = InvalidProblem("bad_request", f"{error.message.rstrip('.')}{cause}")
        problem.status = error.status_code
        return problem_response(problem)
