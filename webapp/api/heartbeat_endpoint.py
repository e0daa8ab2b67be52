"""ASGI application for heartbeats, which bypasses Django's middleware to serve 1000 hosts.

Same URL, request and response as the operation ``/hosts/beat`` of the API, which documents it and
serves it under WSGI. The heartbeats of one second are stored in one transaction.
"""

import asyncio

import structlog
from asgiref.sync import sync_to_async
from pydantic import ValidationError

from runners.messages import Beat, first_fault
from runners.wire import read_json
from webapp.api.problems import faults_of, invalid, not_authenticated, send_problem
from webapp.core.asgi_messages import Receive, Scope, Send, send_answer
from webapp.core.outages import outage_of
from webapp.core.pace import BEAT, calls
from webapp.core.problems import BusyProblem, InvalidProblem, Problem, TooLargeProblem
from webapp.hosts.heartbeats import Answer, HeartbeatBatcher, heartbeat_refused
from webapp.hosts.host_limits import QuotaProblem, is_first_in_a_minute, keep_heartbeat
from webapp.hosts.services import digest

PATH = "/api/v1/hosts/beat"
MAX_BODY_BYTES = 1024**2
RETRY_AFTER_SECONDS = 5
JSON_HEADERS = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
log = structlog.get_logger(__name__)
_batchers: dict[asyncio.AbstractEventLoop, HeartbeatBatcher] = {}


def is_beat(scope: Scope) -> bool:
    """Return whether a request is a heartbeat."""
    return bool(scope["path"] == PATH and scope["method"] == "POST")


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer one heartbeat."""
    credential = refused = ""
    answer: Answer
    try:
        credential = _credential(scope)
        calls.keep(BEAT, digest(credential))
        keep_heartbeat(digest(credential))
        beat = Beat.model_validate(read_json(await _body(receive)))
        answer = await _batcher().take(credential, beat)
    except (ValueError, Problem) as error:
        answer, refused = _refusal(credential, error)
    except Exception as error:  # the database failed; the next heartbeat repeats the content
        log.warning("beats not stored", exc_info=True)
        sentence = "The server cannot store heartbeats now; the host retries by itself."
        busy = BusyProblem("busy", sentence, retry_after_seconds=RETRY_AFTER_SECONDS)
        answer = outage_of(error) or busy
    if refused:  # not within `except`: an await there would keep the error alive in this frame
        await sync_to_async(heartbeat_refused)(credential, refused)
    if isinstance(answer, Problem):
        await send_problem(send, answer)
    else:
        await send_answer(send, 200, JSON_HEADERS, answer.model_dump_json().encode())


def _refusal(credential: str, error: ValueError | Problem) -> tuple[Problem, str]:
    """Return the response to a refused heartbeat, and the reason to record for its host.

    The error loses its traceback, which would keep the frame with the answer alive.
    """
    if isinstance(error, ValidationError):
        return invalid(faults_of(error)), first_fault(error)
    if isinstance(error, Problem):
        is_recorded = isinstance(error, QuotaProblem) and is_first_in_a_minute(
            digest(credential), error
        )
        reason = f"{error.quota.reason}: it waits" if isinstance(error, QuotaProblem) else ""
        return error.with_traceback(None), reason if is_recorded else ""
    return InvalidProblem("invalid", f"The heartbeat cannot be read: {error}."), str(error)


def _batcher() -> HeartbeatBatcher:
    """Return the running event loop's batcher, created on first use."""
    loop = asyncio.get_running_loop()
    for other in [each for each in _batchers if each.is_closed()]:
        del _batchers[other]
    return _batchers.setdefault(loop, HeartbeatBatcher())


def _credential(scope: Scope) -> str:
    """Return the bearer token of a request.

    Raises:
        UnauthorizedProblem: the request has none.
    """
    for name, value in scope["headers"]:
        scheme, _, token = value.decode("latin-1").partition(" ")
        if name == b"authorization" and scheme.lower() == "bearer" and token.strip():
            return str(token.strip())
    raise not_authenticated()


async def _body(receive: Receive) -> bytes:
    """Return the body of a request.

    Raises:
        TooLargeProblem: the body is larger than any heartbeat.
    """
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise TooLargeProblem("too_large", f"A heartbeat has at most {MAX_BODY_BYTES} bytes.")
        if not message.get("more_body", False):
            return bytes(body)
