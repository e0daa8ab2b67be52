"""Operations of hosts on attempts: claim, report events, download data, upload artefacts."""

from pathlib import Path
from typing import Annotated

from django.conf import settings
from django.http import HttpRequest, StreamingHttpResponse
from ninja import Query, Router

from runners.messages import ClaimReply, ClaimRequest, EventAck, ReceivedBatch, UploadState
from webapp.api.auth import HostAuth, calling_host
from webapp.api.problems import BYTES_TYPE, REFUSALS, bytes_in, bytes_out
from webapp.core.disk import MIN_FREE_BYTES, check_room
from webapp.core.problems import InvalidProblem, NotFoundProblem
from webapp.datasets.services import file_chunks, path_of, promised_dataset
from webapp.jobs import uploads
from webapp.jobs.claims import attempt_claim, attempt_secrets
from webapp.jobs.downloads import in_threads
from webapp.jobs.ingest import events_accept

router = Router(tags=["attempts"], auth=HostAuth())


@router.post("/{attempt_id}/claim", response={200: ClaimReply, **REFUSALS})
def claim(request: HttpRequest, attempt_id: str, body: ClaimRequest) -> ClaimReply:
    """Claim an attempt; exactly one claim gets its job spec."""
    host = calling_host(request)
    reply = attempt_claim(attempt_id=attempt_id, host=host, request=body)
    if not reply.may_start:
        return reply
    return ClaimReply(request=reply.request, secrets=attempt_secrets(reply.request))


@router.post("/{attempt_id}/events", response={200: EventAck, **REFUSALS})
def events(request: HttpRequest, attempt_id: str, body: ReceivedBatch) -> EventAck:
    """Report consecutive events; the reply has the last sequence number stored without a gap."""
    if body.attempt_id != attempt_id:
        raise InvalidProblem(
            "other_attempt", f"The body is about {body.attempt_id}, the address {attempt_id}."
        )
    check_room(Path(settings.DATA_DIR), MIN_FREE_BYTES)
    host = calling_host(request)
    return events_accept(host=host, batch=body, num_bytes=len(request.body))


@router.get(
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


@router.get("/{attempt_id}/artefacts/{name}/{path:path}", response={200: UploadState, **REFUSALS})
def artefact_state(request: HttpRequest, attempt_id: str, name: str, path: str) -> UploadState:
    """Return the number of received bytes of a file: the offset of its next part."""
    file = uploads.find(host=calling_host(request), attempt_id=attempt_id, name=name, path=path)
    return UploadState(received_bytes=uploads.received_bytes(file))


@router.put(
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
    file = uploads.find(host=calling_host(request), attempt_id=attempt_id, name=name, path=path)
    return UploadState(received_bytes=uploads.write_part(file, offset, request))
