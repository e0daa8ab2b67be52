"""The ASGI branch for beats: a thousand hosts knock here, so nothing stands in front of it.

Same address, same body and same answers as the API's operation of that name, which describes it
and serves under servers without ASGI; what is saved is Django's middleware, and the beats of one
second are stored together.
"""

import asyncio

import structlog
from pydantic import ValidationError

from runners.messages import Beat
from webapp.api.problems import invalid, not_authenticated, raw_problem
from webapp.core.pace import BEAT, calls
from webapp.core.problems import BusyProblem, Problem, TooLargeProblem
from webapp.hosts.beat_desk import BeatDesk
from webapp.hosts.services import digest
from webapp.live.stream import Receive, Scope, Send

PATH = "/api/v1/hosts/beat"
MAX_BODY_BYTES = 1024**2
RETRY_AFTER_SECONDS = 5
JSON_HEADERS = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
log = structlog.get_logger(__name__)
_desks: dict[asyncio.AbstractEventLoop, BeatDesk] = {}


def is_beat(scope: Scope) -> bool:
    """Return whether a connection is a beat."""
    return bool(scope["path"] == PATH and scope["method"] == "POST")


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer one beat."""
    try:
        credential = _credential(scope)
        calls.keep(BEAT, digest(credential))
        beat = Beat.model_validate_json(await _body(receive))
        answer = await _desk().take(credential, beat)
    except ValidationError as error:
        answer = invalid([dict(item) for item in error.errors(include_url=False)])
    except Problem as problem:
        answer = problem
    except Exception:  # the database's trouble; the next beat brings the same news
        log.warning("beats not stored", exc_info=True)
        sentence = "The server cannot store beats just now; the host tries again by itself."
        answer = BusyProblem("busy", sentence, retry_after_seconds=RETRY_AFTER_SECONDS)
    if isinstance(answer, Problem):
        await _refuse(send, answer)
    else:
        await _send(send, 200, JSON_HEADERS, answer.model_dump_json().encode())


def _desk() -> BeatDesk:
    """Return the running loop's desk, made on first use."""
    loop = asyncio.get_running_loop()
    for other in [known for known in _desks if known.is_closed()]:
        del _desks[other]
    return _desks.setdefault(loop, BeatDesk())


def _credential(scope: Scope) -> str:
    """Return the bearer token of a request.

    Raises:
        UnauthorizedProblem: it has none.
    """
    for name, value in scope["headers"]:
        scheme, _, token = value.decode("latin-1").partition(" ")
        if name == b"authorization" and scheme.lower() == "bearer" and token.strip():
            return str(token.strip())
    raise not_authenticated()


async def _body(receive: Receive) -> bytes:
    """Return the body of a request.

    Raises:
        TooLargeProblem: it is larger than any beat.
    """
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise TooLargeProblem("too_large", f"A beat has at most {MAX_BODY_BYTES} bytes.")
        if not message.get("more_body", False):
            return bytes(body)


async def _refuse(send: Send, problem: Problem) -> None:
    status, headers, body = raw_problem(problem)
    await _send(send, status, headers, body)


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
