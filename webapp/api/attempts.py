"""What hosts call about an attempt: claim it, report its events, hand over its artefacts."""

from pathlib import Path
from typing import Annotated

from django.conf import settings
from django.http import HttpRequest, StreamingHttpResponse
from ninja import Query, Router

from runners.messages import (
    ClaimReply,
    ClaimRequest,
    EventAck,
    EventBatch,
    UploadState,
)
from webapp.api.auth import HostAuth, calling_host
from webapp.api.problems import REFUSALS
from webapp.core.disk import MIN_FREE_BYTES, check_room
from webapp.core.problems import InvalidProblem, NotFoundProblem
from webapp.datasets.services import path_of, pieces, promised_dataset
from webapp.jobs import uploads
from webapp.jobs.claims import attempt_claim, attempt_secrets
from webapp.jobs.downloads import in_threads
from webapp.jobs.ingest import events_accept

router = Router(tags=["attempts"], auth=HostAuth())


@router.post("/{attempt_id}/claim", response={200: ClaimReply, **REFUSALS})
def claim(request: HttpRequest, attempt_id: str, body: ClaimRequest) -> ClaimReply:
    """Ask for the spec of an attempt: exactly one claim gets it."""
    host = calling_host(request)
    reply = attempt_claim(attempt_id=attempt_id, host=host, request=body)
    if not reply.may_start:
        return reply
    return ClaimReply(request=reply.request, secrets=attempt_secrets(reply.request))


@router.post("/{attempt_id}/events", response={200: EventAck, **REFUSALS})
def events(request: HttpRequest, attempt_id: str, body: EventBatch) -> EventAck:
    """Report consecutive events; the reply says what is stored without a gap."""
    if body.attempt_id != attempt_id:
        raise InvalidProblem(
            "other_attempt", f"The body is about {body.attempt_id}, the address {attempt_id}."
        )
    check_room(Path(settings.DATA_DIR), MIN_FREE_BYTES)
    return events_accept(host=calling_host(request), batch=body)


@router.get("/{attempt_id}/data/{dataset_id}", response={**REFUSALS})
def training_data(request: HttpRequest, attempt_id: str, dataset_id: str) -> StreamingHttpResponse:
    """Send the training data that an attempt of this host was promised, whole."""
    dataset = promised_dataset(attempt_id, calling_host(request), dataset_id)
    path = path_of(dataset)
    if not path.is_file():
        raise NotFoundProblem("no_dataset", f"The file of {dataset.name} is no longer here.")
    response = StreamingHttpResponse(
        in_threads(pieces(path)), content_type="application/octet-stream"
    )
    response["Content-Length"] = str(path.stat().st_size)
    return response


@router.get("/{attempt_id}/artefacts/{name}/{path:path}", response={200: UploadState, **REFUSALS})
def artefact_state(request: HttpRequest, attempt_id: str, name: str, path: str) -> UploadState:
    """Say how much of a file has arrived: where the next part starts."""
    file = uploads.find(host=calling_host(request), attempt_id=attempt_id, name=name, path=path)
    return UploadState(received_bytes=uploads.received_bytes(file))


@router.put("/{attempt_id}/artefacts/{name}/{path:path}", response={200: UploadState, **REFUSALS})
def artefact_part(
    request: HttpRequest,
    attempt_id: str,
    name: str,
    path: str,
    offset: Annotated[int, Query(ge=0)],
) -> UploadState:
    """Take one part of a file; a part that does not start where the file ends is not taken."""
    file = uploads.find(host=calling_host(request), attempt_id=attempt_id, name=name, path=path)
    return UploadState(received_bytes=uploads.write_part(file, offset, request))
