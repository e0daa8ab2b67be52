"""Artefacts of attempts: uploaded in parts, verified by digest, downloaded as a .tar."""

import hashlib
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import transaction
from django.http import Http404, HttpRequest, StreamingHttpResponse
from django.views.decorators.http import require_GET

from webapp.core.disk import check_room
from webapp.core.problems import (
    ConflictProblem,
    InvalidProblem,
    NotFoundProblem,
    TooLargeProblem,
)
from webapp.hosts.models import Host
from webapp.jobs.lookup import load_job
from webapp.jobs.models import Artefact, Job
from webapp.live.publish import publish

# Upload artefact files in parts: confined to one folder, verified by digest.


MAX_PART_BYTES = 16 * 1024**2
MIN_FREE_BYTES = 512 * 1024**2
PIECE_BYTES = 1024**2
PARTIAL_SUFFIX = ".part"
MAX_NAME_BYTES = 255 - len(PARTIAL_SUFFIX)  # per name, the file systems' limit
MAX_PATH_BYTES = 1000


class Readable(Protocol):
    """A source of bytes that is read in chunks."""

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes; empty at the end."""


class UploadFile(NamedTuple):
    """One announced file of an artefact, and its target path."""

    artefact: Artefact
    path: str
    size_bytes: int
    target: Path

    @property
    def partial(self) -> Path:
        """Return the path of the incomplete file."""
        return self.target.with_name(self.target.name + PARTIAL_SUFFIX)


def folder_of(artefact: Artefact) -> Path:
    """Return the folder that holds an artefact's files on the server."""
    return Path(settings.ARTEFACTS_DIR) / artefact.attempt_id / artefact.name


def confined(folder: Path, path: str) -> Path:
    """Return the path of ``path`` inside ``folder``.

    Raises:
        InvalidProblem: the path is absolute, leaves the folder, or is hidden.
    """
    parts = PurePosixPath(path).parts
    if not parts or any(part in {"/", "..", "."} or part.startswith(".") for part in parts):
        raise InvalidProblem("bad_path", f"The path {path!r} leaves the artefact's folder.")
    if "\x00" in path or "\\" in path:
        raise InvalidProblem("bad_path", f"The path {path!r} holds a character that no file has.")
    if len(path.encode()) > MAX_PATH_BYTES or any(len(p.encode()) > MAX_NAME_BYTES for p in parts):
        sentence = (
            f"The path {path[:40]!r}… has {len(path.encode())} bytes. A path has {MAX_PATH_BYTES} "
            f"at most, each name in it {MAX_NAME_BYTES}: shorten the file's name."
        )
        raise InvalidProblem("bad_path", sentence)
    return folder.joinpath(*parts)


def find(*, host: Host, attempt_id: str, name: str, path: str) -> UploadFile:
    """Return the announced file of an artefact of one of the host's attempts.

    Raises:
        NotFoundProblem: the artefact or the file was never announced by this host.
    """
    artefact = Artefact.objects.filter(
        attempt_id=attempt_id, attempt__host=host, name=name
    ).first()
    if artefact is None:
        raise NotFoundProblem(
            "unknown_artefact", f"No artefact {name!r} of this attempt was announced yet."
        )
    if path not in artefact.files:
        raise NotFoundProblem("unknown_file", f"The artefact {name!r} has no file {path!r}.")
    target = confined(folder_of(artefact), path)
    return UploadFile(artefact, path, int(artefact.files[path]), target)


def received_bytes(file: UploadFile) -> int:
    """Return the received bytes; verify a complete file whose check was interrupted."""
    if file.target.is_file():
        if not file.artefact.is_complete:
            _update_completeness(file.artefact)
        return file.target.stat().st_size
    have = file.partial.stat().st_size if file.partial.is_file() else 0
    if not have or have < file.size_bytes:
        return have
    try:
        _complete(file)
    except ConflictProblem:
        return 0
    return have


def write_part(file: UploadFile, offset: int, body: Readable) -> int:
    """Append a part at the current end; return the received bytes afterwards.

    A part with another offset changes nothing; the returned number is where to continue. The
    complete file is verified by its digest, and starts again from 0 if that differs.

    Raises:
        TooLargeProblem: the part exceeds its limit or the announced size.
        BusyProblem: the disk is nearly full.
        ConflictProblem: the complete file differs from its digest, or its path is taken.
    """
    have = received_bytes(file)
    is_new_empty = file.size_bytes == 0 and not file.target.exists()
    if offset != have or (have == file.size_bytes and not is_new_empty):
        return have
    _check_disk(file)
    written = _append(file, offset, body)
    if offset + written == file.size_bytes:
        _complete(file)
    return offset + written


def _check_disk(file: UploadFile) -> None:
    try:
        file.target.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        sentence = f"{file.path} lies below what is itself a file; one of the two has no place."
        raise ConflictProblem("path_taken", sentence) from None
    if file.target.is_dir() or file.partial.is_dir():
        raise ConflictProblem("path_taken", f"{file.path} is a folder of another file.")
    check_room(file.target.parent, MIN_FREE_BYTES + MAX_PART_BYTES)


def _append(file: UploadFile, offset: int, body: Readable) -> int:
    limit = min(MAX_PART_BYTES, file.size_bytes - offset)
    written = 0
    with file.partial.open("ab") as sink:
        while piece := body.read(PIECE_BYTES):
            written += len(piece)
            if written > limit:
                sink.truncate(offset)
                raise TooLargeProblem("part_too_large", f"At most {limit} bytes fit here.")
            sink.write(piece)
    return written


def _complete(file: UploadFile) -> None:
    expected = file.artefact.sha256.get(file.path)
    try:
        with file.partial.open("rb") as source:
            actual = hashlib.file_digest(source, "sha256").hexdigest()
    except FileNotFoundError:
        sentence = f"Another call completed {file.path} meanwhile; ask how much of it is here."
        raise ConflictProblem("completed_meanwhile", sentence) from None
    if actual != expected:
        file.partial.unlink()
        raise ConflictProblem(
            "digest_differs", f"{file.path} arrived with another digest; send it again from 0."
        )
    file.partial.replace(file.target)
    _update_completeness(file.artefact)


def _update_completeness(artefact: Artefact) -> None:
    folder = folder_of(artefact)
    with transaction.atomic():
        row = Artefact.objects.select_for_update().get(pk=artefact.pk)
        if all(confined(folder, path).is_file() for path in row.files):
            Artefact.objects.filter(pk=row.pk).update(is_complete=True)
            job_id = row.attempt.job_id
            transaction.on_commit(
                lambda: publish(f"job:{job_id}", "job.artefact", {"job": job_id, "name": row.name})
            )


# Download an artefact as a streamed .tar, without copies or buffering in memory.


END_BLOCKS = 2
MODE = 0o644


@require_GET
def job_download(request: HttpRequest, job_id: str, name: str) -> StreamingHttpResponse:
    """Stream a complete artefact of the job's current attempt as a .tar file."""
    job = load_job(request, job_id)
    artefact = _complete_artefact(job, name)
    members = [(path, confined(folder_of(artefact), path)) for path in sorted(artefact.files)]
    if not all(file.is_file() for _, file in members):
        raise Http404("The files of this artefact are no longer on the server.")
    root = f"{file_name(job.name)}-{file_name(artefact.name)}"
    pieces = tar_chunks(root, members, int(artefact.created_at.timestamp()))
    response = StreamingHttpResponse(in_threads(pieces), content_type="application/x-tar")
    response["Content-Disposition"] = f'attachment; filename="{root}.tar"'
    response["Content-Length"] = str(tar_bytes(root, members))
    return response


def _complete_artefact(job: Job, name: str) -> Artefact:
    artefact = Artefact.objects.filter(
        attempt=job.current_attempt, name=name, is_complete=True
    ).first()
    if artefact is None:
        raise Http404("This job has no complete artefact of this name.")
    return artefact


def file_name(name: str) -> str:
    """Return a job's name, restricted to characters for file names and headers."""
    cleaned = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)
    return cleaned.strip("-.") or "job"


def _header(root: str, path: str, size: int, mtime: int) -> bytes:
    info = tarfile.TarInfo(f"{root}/{path}")
    info.size, info.mtime, info.mode = size, mtime, MODE
    return info.tobuf(tarfile.PAX_FORMAT)


def _padding(size: int) -> int:
    return -size % tarfile.BLOCKSIZE


def tar_bytes(root: str, members: list[tuple[str, Path]]) -> int:
    """Return the size of the .tar in bytes, so that a browser can show progress."""
    sizes = [(path, file.stat().st_size) for path, file in members]
    body = sum(len(_header(root, path, n, 0)) + n + _padding(n) for path, n in sizes)
    return body + END_BLOCKS * tarfile.BLOCKSIZE


def tar_chunks(root: str, members: list[tuple[str, Path]], mtime: int) -> Iterator[bytes]:
    """Yield the .tar in chunks, at most one chunk of one file at a time."""
    for path, file in members:
        size = file.stat().st_size
        yield _header(root, path, size, mtime)
        with file.open("rb") as source:
            while piece := source.read(PIECE_BYTES):
                yield piece
        yield b"\0" * _padding(size)
    yield b"\0" * END_BLOCKS * tarfile.BLOCKSIZE


async def in_threads(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the chunks, reading the disk in threads so that the event loop is not blocked."""

    def read() -> bytes | None:
        return next(pieces, None)

    while (piece := await sync_to_async(read, thread_sensitive=False)()) is not None:
        yield piece
