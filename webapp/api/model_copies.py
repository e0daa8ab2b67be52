"""Operations on copies of models: of people who order or send them, and of the hosts at both ends.

A receiving host reads ``/copies/ID/hub`` as it reads the Hub: by ranges, resumed, verified.
"""

from typing import Annotated

from django.http import HttpRequest, HttpResponseBase
from ninja import Query, Router, Status
from pydantic import Field

from runners.client.replies.model_copies import (
    CopiedFileReply,
    ModelCopyDetail,
    ModelCopyPage,
    ModelCopyReply,
    PartReply,
)
from runners.hub.repository import COMMIT
from runners.jobspec.base import REPOSITORY, RevisionText, owner_fault
from runners.shared.messages import (
    MAX_COPIED_FILES,
    CopyEnd,
    CopyFile,
    CopyFiles,
    CopyState,
    Etag,
    FilePath,
    StoredBytes,
    UploadState,
)
from webapp.accounts.services import visible_or_404
from webapp.api.agents import OF_HOSTS, HostAuth, calling_host
from webapp.api.auth import ADMIN, READ
from webapp.api.requests import Paging, Sent, page_of
from webapp.core.bodies import takes_file
from webapp.core.problems import REFUSALS, InvalidProblem, NotFoundProblem, bytes_in, bytes_out
from webapp.core.streaming import file_response
from webapp.hosts import model_copies
from webapp.hosts.models import Host, ModelCopy
from webapp.hosts.permissions import host_for_operator

router = Router(tags=["hosts"], auth=READ)
Offset = Annotated[int, Query(ge=0, description="Bytes of the file before this part")]


def _fields(copy: ModelCopy) -> dict[str, object]:
    state = model_copies.state_of(copy)
    return {
        "id": copy.pk,
        "host": copy.host.slug,
        "source": copy.source.slug if copy.source else None,
        "repository": copy.repository,
        "commit": copy.commit,
        "state": copy.state,
        "problem": copy.problem,
        "size_bytes": copy.size_bytes,
        "received_bytes": sum(each.received_bytes for each in state.files),
        "there_bytes": copy.there_bytes,
        "asked_by": copy.asked_by,
        "created_at": copy.created_at,
        "ended_at": copy.ended_at,
        "files": [
            CopiedFileReply(
                path=each.path,
                size_bytes=each.size_bytes,
                received_bytes=each.received_bytes,
                is_there=each.is_there,
            )
            for each in state.files
        ],
    }


def _detail(copy: ModelCopy) -> ModelCopyDetail:
    return ModelCopyDetail.model_validate(_fields(copy))


@router.get(
    "/{slug}/copies", response={200: ModelCopyPage, **REFUSALS}, operation_id="list_model_copies"
)
def copy_list(request: HttpRequest, slug: str, paging: Query[Paging]) -> ModelCopyPage:
    """Return the copies of models to a host, the newest first."""
    host = visible_or_404(Host, request.user, slug=slug)
    rows = model_copies.copies_to(host)
    shown, more = page_of("model_copies", rows, lambda row: row.pk, paging)
    items = [ModelCopyReply.model_validate(_fields(row)) for row in shown]
    return ModelCopyPage(items=items, next_cursor=more)


class PushedFile(Sent):
    """A file that a person sends."""

    path: Annotated[FilePath, Field(description="Below the model's folder")]
    size_bytes: Annotated[StoredBytes, Field(description="0 to 2^63 - 1")]
    etag: Annotated[
        Etag,
        Field(description="SHA-256 in hex, or of a small file git's SHA-1: its name in the cache"),
    ]


class NewModelCopy(Sent):
    """Which model is copied: one of another host's cache, or files that the caller sends."""

    model: Annotated[
        str,
        Field(
            min_length=3, max_length=250, description="As org/name, or org/name@commit with files"
        ),
    ]
    source: Annotated[
        Annotated[str, Field(max_length=80)] | None,
        Field(description="Slug of the host whose cache has it; null: the caller sends files"),
    ] = None
    revision: Annotated[
        RevisionText | None,
        Field(description="Branch or tag that stands for the commit of the files; null: none"),
    ] = None
    files: Annotated[
        list[PushedFile],
        Field(max_length=MAX_COPIED_FILES, description="In the order of sending; not with source"),
    ] = []


@router.post(
    "/{slug}/copies",
    auth=ADMIN,
    response={201: ModelCopyDetail, **REFUSALS},
    operation_id="copy_model",
)
def copy_begin(request: HttpRequest, slug: str, body: NewModelCopy) -> Status[ModelCopyDetail]:
    """Begin to copy a model into the cache of a host, or return the copy that is under way.

    Of files that the caller sends, in parts by ``send_model_part``, each goes on at the
    ``received_bytes`` of the reply.
    """
    host, by = host_for_operator(request, slug), request.user.get_username()
    if body.source is not None:
        if body.files or body.revision:
            raise InvalidProblem("files", "Give files and revision, or source, not both.")
        source = host_for_operator(request, body.source)
        if source.team_id != host.team_id:
            raise NotFoundProblem(
                "source", f"The team of {host.name} has no host {body.source!r}."
            )
        copy = model_copies.copy_from_host(host=host, source=source, name=body.model, by=by)
        return Status(201, _detail(copy))
    repository, _, commit = body.model.partition("@")
    if not REPOSITORY.fullmatch(repository) or not body.files:
        raise InvalidProblem(
            "model",
            "Give model as org/name@commit with the files that you send, or source: the host "
            "that has the model.",
        )
    if fault := owner_fault(repository):
        raise InvalidProblem("model", f"{fault}.")
    if not COMMIT.fullmatch(commit):
        raise InvalidProblem(
            "model", f"The commit of {repository} is {commit[:50]!r}; it has 40 hex digits."
        )
    copy = model_copies.copy_from_folder(
        host=host,
        repository=repository,
        commit=commit,
        revision=body.revision or "",
        files=[CopyFile.model_validate(each.model_dump()) for each in body.files],
        by=by,
    )
    return Status(201, _detail(copy))


def _copy_to(host: Host, copy_id: str) -> ModelCopy:
    rows = ModelCopy.objects.select_related("host", "source")
    copy = rows.filter(host=host, pk=copy_id).first()
    if copy is None:
        raise NotFoundProblem("no_copy", f"No model is or was copied to {host.name} by this id.")
    return copy


@router.get(
    "/{slug}/copies/{copy_id}",
    response={200: ModelCopyDetail, **REFUSALS},
    operation_id="get_model_copy",
)
def copy_get(request: HttpRequest, slug: str, copy_id: str) -> ModelCopyDetail:
    """Return a copy with its files and where each is."""
    return _detail(_copy_to(visible_or_404(Host, request.user, slug=slug), copy_id))


@router.delete(
    "/{slug}/copies/{copy_id}",
    auth=ADMIN,
    response={200: ModelCopyDetail, **REFUSALS},
    operation_id="stop_model_copy",
)
def copy_stop(request: HttpRequest, slug: str, copy_id: str) -> ModelCopyDetail:
    """Stop a copy; what the host has received stays there for the next one."""
    copy = _copy_to(host_for_operator(request, slug), copy_id)
    return _detail(model_copies.copy_stop(copy=copy, by=request.user.get_username()))


@router.put(
    "/{slug}/copies/{copy_id}/files/{number}",
    auth=ADMIN,
    response={200: PartReply, **REFUSALS},
    openapi_extra=bytes_in(),
    operation_id="send_model_part",
)
@takes_file(model_copies.MAX_PART_BYTES, "PUT")
def part_send(
    request: HttpRequest, slug: str, copy_id: str, number: int, offset: Offset
) -> PartReply:
    """Append a part to a file of a copy; the reply says where to go on.

    429 with the code ``copy_waits``: the server has no room until the host took other files.
    """
    copy = _copy_to(host_for_operator(request, slug), copy_id)
    if copy.source_id is not None:
        raise NotFoundProblem("no_copy", f"{copy} is sent by {copy.source}, not by a person.")
    received = model_copies.part_write(copy=copy, number=number, offset=offset, body=request)
    return PartReply(received_bytes=received)


# Hosts at both ends

of_hosts = Router(tags=[OF_HOSTS], auth=HostAuth(), by_alias=True)


@of_hosts.get("/{copy_id}", response={200: CopyState, **REFUSALS}, operation_id="get_copy_state")
def state(request: HttpRequest, copy_id: str) -> CopyState:
    """Return how far a copy is in which the host takes part."""
    return model_copies.state_of(model_copies.copy_of(calling_host(request), copy_id))


@of_hosts.put(
    "/{copy_id}/files", response={200: CopyState, **REFUSALS}, operation_id="announce_copy_files"
)
def announce(request: HttpRequest, copy_id: str, body: CopyFiles) -> CopyState:
    """Say what the host sends."""
    copy = model_copies.copy_of(calling_host(request), copy_id, sends=True)
    return model_copies.state_of(
        model_copies.files_announce(copy=copy, files=body.files, revision=body.revision)
    )


@of_hosts.put(
    "/{copy_id}/files/{number}",
    response={200: UploadState, **REFUSALS},
    openapi_extra=bytes_in(),
    operation_id="send_copy_part",
)
@takes_file(model_copies.MAX_PART_BYTES, "PUT")
def part(request: HttpRequest, copy_id: str, number: int, offset: Offset) -> UploadState:
    """Append a part to a file that the host sends; the reply says where to go on."""
    copy = model_copies.copy_of(calling_host(request), copy_id, sends=True)
    received = model_copies.part_write(copy=copy, number=number, offset=offset, body=request)
    return UploadState(received_bytes=received)


@of_hosts.get(
    "/{copy_id}/hub/{org}/{name}/resolve/{commit}/{path:path}",
    response={200: None, **REFUSALS},
    openapi_extra=bytes_out("The file, or the range of it that the header Range names"),
    operation_id="download_copied_file",
)
def download(
    request: HttpRequest, copy_id: str, org: str, name: str, commit: str, path: str
) -> HttpResponseBase:
    """Return a file that the host receives, or a range of it."""
    copy = model_copies.copy_of(calling_host(request), copy_id, sends=False)
    if (copy.repository, copy.commit) != (f"{org}/{name}", commit):
        raise NotFoundProblem("no_file", f"This is a copy of {copy}, not of {org}/{name}.")
    held = model_copies.file_at(copy, path)
    return file_response(held, request.headers.get("Range", ""))


@of_hosts.post(
    "/{copy_id}/files/{number}/taken",
    response={200: CopyState, **REFUSALS},
    operation_id="take_copied_file",
)
def taken(
    request: HttpRequest,
    copy_id: str,
    number: int,
    *,
    is_right: Annotated[
        bool, Query(description="false: its digest is wrong, and it has to be sent again")
    ] = True,
) -> CopyState:
    """Record that the host has verified a file; the server deletes its own."""
    copy = model_copies.copy_of(calling_host(request), copy_id, sends=False)
    return model_copies.state_of(
        model_copies.file_take(copy=copy, number=number, is_right=is_right)
    )


@of_hosts.post("/{copy_id}/end", response={200: CopyState, **REFUSALS}, operation_id="end_copy")
def end(request: HttpRequest, copy_id: str, body: CopyEnd) -> CopyState:
    """End a copy: every file is there under its name, or the host cannot go on."""
    host = calling_host(request)
    copy = model_copies.copy_of(host, copy_id, sends=None if body.problem else False)
    return model_copies.state_of(model_copies.copy_end(copy=copy, host=host, problem=body.problem))
