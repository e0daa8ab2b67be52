"""The API of host agents: their keys, heartbeats and enrolment."""

import asyncio
import os
import time
from pathlib import Path
from typing import Annotated

import structlog
from asgiref.sync import sync_to_async
from django.conf import settings
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from ninja import Query, Router
from ninja.security import HttpBearer
from pydantic import ValidationError

from runners.jobspec.base import read_json
from runners.shared.addresses import is_this_machine
from runners.shared.messages import (
    Beat,
    BeatReply,
    ClaimReply,
    ClaimRequest,
    EnrollReply,
    EnrollRequest,
    EventAck,
    ReceivedBatch,
    RotateReply,
    RotateRequest,
    UploadState,
    first_fault,
)
from webapp.accounts.sign_in import address_of
from webapp.agents.dispatch import attempt_claim, attempt_secrets
from webapp.agents.heartbeats import Answer, HeartbeatBatcher, heartbeat_refused, host_beat
from webapp.agents.ingest import events_accept
from webapp.core.bodies import takes_file
from webapp.core.outages import MIN_FREE_BYTES, check_room, outage_of
from webapp.core.pace import BEAT, HOST, MOST_KNOWN, STRANGER, calls
from webapp.core.problems import (
    BYTES_TYPE,
    REFUSALS,
    BusyProblem,
    InvalidProblem,
    NotFoundProblem,
    Problem,
    Receive,
    Scope,
    Send,
    TooLargeProblem,
    UnauthorizedProblem,
    bytes_in,
    bytes_out,
    closing,
    faults_of,
    invalid,
    not_authenticated,
    send_answer,
    send_problem,
)
from webapp.core.streaming import in_threads
from webapp.datasets.services import file_chunks, path_of
from webapp.hosts.models import Host
from webapp.hosts.pools import QuotaProblem, is_first_in_a_minute, keep_heartbeat
from webapp.hosts.services import (
    UNKNOWN_CREDENTIAL,
    digest,
    host_by_credential,
    host_enroll,
    host_rotate,
)
from webapp.jobs import artefacts
from webapp.jobs.artefacts import promised_dataset

# ---------------------------------------------------------------------------
# API authentication of hosts by bearer credential.
# ---------------------------------------------------------------------------


class HostAuth(HttpBearer):
    """A host's credential as bearer token; the host becomes ``request.auth``."""

    openapi_name = "HostCredential"

    def authenticate(self, request: HttpRequest, token: str) -> Host:
        """Return the host.

        Raises:
            UnauthorizedProblem: no host has this credential.
            BusyProblem: the caller exceeds its rate limit.
        """
        host = host_by_credential(token)
        if host is None:
            calls.keep(STRANGER, address_of(request))
            raise UnauthorizedProblem(*UNKNOWN_CREDENTIAL)
        calls.keep(HOST, host.pk)
        return host


def calling_host(request: HttpRequest) -> Host:
    """Return the host that ``HostAuth`` authenticated."""
    host: Host = request.auth  # type: ignore[attr-defined]  # ninja sets it
    return host


# ---------------------------------------------------------------------------
# Operations of hosts: enrol, heartbeats, secrets, claims, events, data and artefacts.
# ---------------------------------------------------------------------------


# Operations of hosts on attempts: claim, report events, download data, upload artefacts.


OF_HOSTS = "host agents"  # the tag of operations that are not for people
# By alias, as messages write themselves: ninja says otherwise, even to models that say so.
attempts_router = Router(tags=[OF_HOSTS], auth=HostAuth(), by_alias=True)


@attempts_router.post(
    "/{attempt_id}/claim", response={200: ClaimReply, **REFUSALS}, operation_id="claim_attempt"
)
def claim(request: HttpRequest, attempt_id: str, body: ClaimRequest) -> ClaimReply:
    """Claim an attempt; exactly one claim gets its job spec."""
    host = calling_host(request)
    reply = attempt_claim(attempt_id=attempt_id, host=host, request=body)
    if not reply.may_start:
        return reply
    return ClaimReply(request=reply.request, secrets=attempt_secrets(reply.request))


@attempts_router.post(
    "/{attempt_id}/events", response={200: EventAck, **REFUSALS}, operation_id="report_events"
)
def events(request: HttpRequest, attempt_id: str, body: ReceivedBatch) -> EventAck:
    """Report consecutive events; the reply has the last sequence number stored without a gap."""
    if body.attempt_id != attempt_id:
        raise InvalidProblem(
            "other_attempt",
            f"The body names attempt {body.attempt_id}, the URL names {attempt_id}.",
        )
    check_room(Path(settings.DATA_DIR), MIN_FREE_BYTES)
    host = calling_host(request)
    return events_accept(host=host, batch=body, num_bytes=len(request.body))


@attempts_router.get(
    "/{attempt_id}/data/{dataset_id}",
    response={200: None, **REFUSALS},
    openapi_extra=bytes_out("The file"),
    operation_id="download_training_data",
)
def training_data(request: HttpRequest, attempt_id: str, dataset_id: str) -> StreamingHttpResponse:
    """Return the training data file of an attempt of this host."""
    dataset = promised_dataset(attempt_id, calling_host(request), dataset_id)
    path = path_of(dataset)
    if not path.is_file():
        raise NotFoundProblem(
            "no_dataset", f"The file of {dataset.name} was deleted on the server. Upload it again."
        )
    response = StreamingHttpResponse(in_threads(file_chunks(path)), content_type=BYTES_TYPE)
    response["Content-Length"] = str(path.stat().st_size)
    return response


@attempts_router.get(
    "/{attempt_id}/artefacts/{name}/{path:path}",
    response={200: UploadState, **REFUSALS},
    operation_id="get_upload_state",
)
def artefact_state(request: HttpRequest, attempt_id: str, name: str, path: str) -> UploadState:
    """Return the number of received bytes of a file: the offset of its next part."""
    file = artefacts.find(host=calling_host(request), attempt_id=attempt_id, name=name, path=path)
    return UploadState(received_bytes=artefacts.received_bytes(file))


@attempts_router.put(
    "/{attempt_id}/artefacts/{name}/{path:path}",
    response={200: UploadState, **REFUSALS},
    openapi_extra=bytes_in(),
    operation_id="upload_artefact_part",
)
@takes_file(artefacts.MAX_PART_BYTES, "PUT")
def artefact_part(
    request: HttpRequest,
    attempt_id: str,
    name: str,
    path: str,
    offset: Annotated[int, Query(ge=0, description="Bytes of the file before this part")],
) -> UploadState:
    """Append one part to a file; reject a part whose offset is not the end of the file."""
    file = artefacts.find(host=calling_host(request), attempt_id=attempt_id, name=name, path=path)
    return UploadState(received_bytes=artefacts.write_part(file, offset, request))


router = Router(tags=[OF_HOSTS], by_alias=True)
MAX_ECHO_BYTES = 2 * 1024**2
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@router.post(
    "/enroll", response={200: EnrollReply, **REFUSALS}, auth=None, operation_id="enroll_host"
)
def enroll(request: HttpRequest, body: EnrollRequest) -> EnrollReply:
    """Enrol a host: exchange a one-time token for the host's own credential."""
    calls.keep(STRANGER, address_of(request))
    return host_enroll(body, is_same_machine=is_same_machine(request, body.facts.boot_id))


@router.post(
    "/beat", response={200: BeatReply, **REFUSALS}, auth=HostAuth(), operation_id="send_heartbeat"
)
def beat(request: HttpRequest, body: Beat) -> BeatReply:
    """Report the state of the host; the reply is its desired state."""
    host = calling_host(request)
    keep_heartbeat(host.credential_hash)
    return host_beat(host=host, beat=body)


@router.post(
    "/rotate",
    response={200: RotateReply, **REFUSALS},
    auth=HostAuth(),
    operation_id="rotate_credential",
)
def rotate(request: HttpRequest, body: RotateRequest) -> RotateReply:
    """Replace the host's secrets; the ones of this request become invalid at once."""
    host = calling_host(request)
    is_here = is_same_machine(request, host.boot_id)
    return host_rotate(host=host, request=body, is_same_machine=is_here)


@router.post(
    "/echo",
    response={200: None, **REFUSALS},
    auth=HostAuth(),
    openapi_extra=bytes_in() | bytes_out("The bytes"),
    operation_id="echo_bytes",
)
@takes_file(MAX_ECHO_BYTES)
def echo(
    request: HttpRequest,
    num_bytes: Annotated[
        int, Query(description=f"Bytes of the response, 0 to {MAX_ECHO_BYTES}")
    ] = 0,
) -> HttpResponse:
    """Receive any bytes and return some, so that a host can measure its network bandwidth."""
    if not 0 <= num_bytes <= MAX_ECHO_BYTES or len(request.body) > MAX_ECHO_BYTES:
        raise TooLargeProblem("too_large", f"At most {MAX_ECHO_BYTES} bytes each way.")
    return HttpResponse(os.urandom(num_bytes), content_type=BYTES_TYPE)


def is_same_machine(request: HttpRequest, boot_id: str) -> bool:
    """Return whether the caller runs on this machine, and can reach Redis on its socket.

    A container has this machine's boot id too, but an address of its own.
    """
    if not BOOT_ID.exists() or BOOT_ID.read_text().strip() != boot_id.strip():
        return False
    return is_this_machine(address_of(request))


# ---------------------------------------------------------------------------
# ASGI application for heartbeats, which bypasses Django's middleware to serve 1000 hosts.
#
# Same URL, request and response as the operation ``/hosts/beat`` of the API, which documents it
# and serves it under WSGI. The heartbeats of one second are stored in one transaction.
# ---------------------------------------------------------------------------


PATH = "/api/v1/hosts/beat"
MAX_BODY_BYTES = 1024**2
RETRY_AFTER_SECONDS = 5
KNOWN_SECONDS = 600.0
JSON_HEADERS = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
log = structlog.get_logger(__name__)
_known_until: dict[str, float] = {}  # by digest of a host's credential
_batchers: dict[asyncio.AbstractEventLoop, HeartbeatBatcher] = {}


def is_beat(scope: Scope) -> bool:
    """Return whether a request is a heartbeat."""
    return bool(scope["path"] == PATH and scope["method"] == "POST")


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer one heartbeat."""
    credential = refused = ""
    is_read = False
    answer: Answer
    try:
        credential = _credential(scope)
        await _check_known(credential, scope)  # before the body: a stranger's takes no memory
        body = await _body(receive)
        is_read = True
        calls.keep(BEAT, digest(credential))
        keep_heartbeat(digest(credential))
        beat = Beat.model_validate(read_json(body))
        answer = await _batcher_of_loop().take(credential, beat)
    except (ValueError, Problem) as error:
        answer, refused = _refusal(credential, error)
    except Exception as error:  # the database failed; the next heartbeat repeats the content
        log.warning("beats not stored", exc_info=True)
        sentence = "The server cannot store heartbeats now. The host retries automatically."
        busy = BusyProblem("busy", sentence, retry_after_seconds=RETRY_AFTER_SECONDS)
        answer = outage_of(error) or busy
    if refused:  # not within `except`: an await there would keep the error alive in this frame
        await sync_to_async(heartbeat_refused)(credential, refused)
    if isinstance(answer, UnauthorizedProblem):
        _known_until.pop(digest(credential), None)  # revoked or rotated since
    if isinstance(answer, Problem):
        await send_problem(send if is_read else closing(receive, send), answer)
    else:
        await send_answer(send, 200, JSON_HEADERS, answer.model_dump_json().encode())


async def _check_known(credential: str, scope: Scope) -> None:
    """Check that a host has the credential, with one query in ten minutes for each host.

    Whether it still has it is checked when the heartbeat is stored.

    Raises:
        UnauthorizedProblem: no host has it.
        BusyProblem: the address sent too many that no host has.
    """
    key, instant = digest(credential), time.monotonic()
    if _known_until.get(key, 0.0) > instant:
        return
    if len(_known_until) >= MOST_KNOWN:
        _known_until.clear()
    if await sync_to_async(host_by_credential)(credential) is None:
        client = scope.get("client")
        calls.keep(STRANGER, client[0] if client else "")
        raise UnauthorizedProblem(*UNKNOWN_CREDENTIAL)
    _known_until[key] = instant + KNOWN_SECONDS


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


def _batcher_of_loop() -> HeartbeatBatcher:
    """Return the running event loop's batcher, created on first use."""
    loop = asyncio.get_running_loop()
    for other in [each for each in _batchers if each.is_closed()]:
        del _batchers[other]
    return _batchers.setdefault(loop, HeartbeatBatcher())


def _credential(scope: Scope) -> str:
    """Return the bearer token of a request.

    Raises:
        UnauthorizedProblem: the request has no bearer token.
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
