"""Operations of hosts: enrol, heartbeats, secrets, claims, events, data and artefacts."""

import os
from pathlib import Path
from typing import Annotated

from django.conf import settings
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from ninja import Query, Router

from runners.messages import (
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
)
from webapp.accounts.sessions import address_of
from webapp.api.auth import HostAuth, calling_host
from webapp.api.problems import BYTES_TYPE, REFUSALS, bytes_in, bytes_out
from webapp.core.disk import MIN_FREE_BYTES, check_room
from webapp.core.pace import STRANGER, calls
from webapp.core.problems import InvalidProblem, NotFoundProblem, TooLargeProblem
from webapp.datasets.services import file_chunks, path_of, promised_dataset
from webapp.hosts.heartbeats import host_beat
from webapp.hosts.host_limits import keep_heartbeat
from webapp.hosts.services import host_enroll, host_rotate
from webapp.jobs import artefacts
from webapp.jobs.artefacts import in_threads
from webapp.jobs.claims import attempt_claim, attempt_secrets
from webapp.jobs.ingest import events_accept

# Operations of hosts on attempts: claim, report events, download data, upload artefacts.


attempts_router = Router(tags=["attempts"], auth=HostAuth())


@attempts_router.post("/{attempt_id}/claim", response={200: ClaimReply, **REFUSALS})
def claim(request: HttpRequest, attempt_id: str, body: ClaimRequest) -> ClaimReply:
    """Claim an attempt; exactly one claim gets its job spec."""
    host = calling_host(request)
    reply = attempt_claim(attempt_id=attempt_id, host=host, request=body)
    if not reply.may_start:
        return reply
    return ClaimReply(request=reply.request, secrets=attempt_secrets(reply.request))


@attempts_router.post("/{attempt_id}/events", response={200: EventAck, **REFUSALS})
def events(request: HttpRequest, attempt_id: str, body: ReceivedBatch) -> EventAck:
    """Report consecutive events; the reply has the last sequence number stored without a gap."""
    if body.attempt_id != attempt_id:
        raise InvalidProblem(
            "other_attempt", f"The body is about {body.attempt_id}, the address {attempt_id}."
        )
    check_room(Path(settings.DATA_DIR), MIN_FREE_BYTES)
    host = calling_host(request)
    return events_accept(host=host, batch=body, num_bytes=len(request.body))


@attempts_router.get(
    "/{attempt_id}/data/{dataset_id}",
    response={200: None, **REFUSALS},
    openapi_extra=bytes_out("The file"),
)
def training_data(request: HttpRequest, attempt_id: str, dataset_id: str) -> StreamingHttpResponse:
    """Return the training data file of an attempt of this host."""
    dataset = promised_dataset(attempt_id, calling_host(request), dataset_id)
    path = path_of(dataset)
    if not path.is_file():
        raise NotFoundProblem("no_dataset", f"The file of {dataset.name} is no longer here.")
    response = StreamingHttpResponse(in_threads(file_chunks(path)), content_type=BYTES_TYPE)
    response["Content-Length"] = str(path.stat().st_size)
    return response


@attempts_router.get(
    "/{attempt_id}/artefacts/{name}/{path:path}", response={200: UploadState, **REFUSALS}
)
def artefact_state(request: HttpRequest, attempt_id: str, name: str, path: str) -> UploadState:
    """Return the number of received bytes of a file: the offset of its next part."""
    file = artefacts.find(host=calling_host(request), attempt_id=attempt_id, name=name, path=path)
    return UploadState(received_bytes=artefacts.received_bytes(file))


@attempts_router.put(
    "/{attempt_id}/artefacts/{name}/{path:path}",
    response={200: UploadState, **REFUSALS},
    openapi_extra=bytes_in(),
)
def artefact_part(
    request: HttpRequest,
    attempt_id: str,
    name: str,
    path: str,
    offset: Annotated[int, Query(ge=0)],
) -> UploadState:
    """Append one part to a file; reject a part whose offset is not the end of the file."""
    file = artefacts.find(host=calling_host(request), attempt_id=attempt_id, name=name, path=path)
    return UploadState(received_bytes=artefacts.write_part(file, offset, request))


router = Router(tags=["hosts"])
MAX_ECHO_BYTES = 2 * 1024**2
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@router.post("/enroll", response={200: EnrollReply, **REFUSALS}, auth=None)
def enroll(request: HttpRequest, body: EnrollRequest) -> EnrollReply:
    """Enrol a host: exchange a one-time token for the host's own credential."""
    calls.keep(STRANGER, address_of(request))
    return host_enroll(body, is_same_machine=is_same_machine(request, body.facts.boot_id))


@router.post("/beat", response={200: BeatReply, **REFUSALS}, auth=HostAuth())
def beat(request: HttpRequest, body: Beat) -> BeatReply:
    """Report the state of the host; the reply is its desired state."""
    host = calling_host(request)
    keep_heartbeat(host.credential_hash)
    return host_beat(host=host, beat=body)


@router.post("/rotate", response={200: RotateReply, **REFUSALS}, auth=HostAuth())
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
)
def echo(request: HttpRequest, num_bytes: int = 0) -> HttpResponse:
    """Receive any bytes and return some, so that a host can measure its network bandwidth."""
    if not 0 <= num_bytes <= MAX_ECHO_BYTES or len(request.body) > MAX_ECHO_BYTES:
        raise TooLargeProblem("too_large", f"At most {MAX_ECHO_BYTES} bytes each way.")
    return HttpResponse(os.urandom(num_bytes), content_type=BYTES_TYPE)


def is_same_machine(request: HttpRequest, boot_id: str) -> bool:
    """Return whether the caller runs on this machine, and can reach Redis on its loopback."""
    if request.META.get("REMOTE_ADDR") not in {"127.0.0.1", "::1"} or not BOOT_ID.exists():
        return False
    return BOOT_ID.read_text().strip() == boot_id.strip()
