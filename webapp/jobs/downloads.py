"""An artefact as one streamed .tar: nothing is copied, nothing is held in memory."""

import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from asgiref.sync import sync_to_async
from django.http import Http404, HttpRequest, StreamingHttpResponse
from django.views.decorators.http import require_GET

from webapp.jobs.lookup import load_job
from webapp.jobs.models import Artefact, Job
from webapp.jobs.uploads import confined, folder_of

PIECE_BYTES = 1024 * 1024
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
    root = f"{_file_name(job.name)}-{_file_name(artefact.name)}"
    pieces = tar_pieces(root, members, int(artefact.created_at.timestamp()))
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


def _file_name(name: str) -> str:
    """Return a job's name as it may stand in a file name and in a header."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)
    return kept.strip("-.") or "job"


def _header(root: str, path: str, size: int, mtime: int) -> bytes:
    info = tarfile.TarInfo(f"{root}/{path}")
    info.size, info.mtime, info.mode = size, mtime, MODE
    return info.tobuf(tarfile.PAX_FORMAT)


def _padding(size: int) -> int:
    return -size % tarfile.BLOCKSIZE


def tar_bytes(root: str, members: list[tuple[str, Path]]) -> int:
    """Return how long the .tar will be, so that a browser can show its progress."""
    sizes = [(path, file.stat().st_size) for path, file in members]
    body = sum(len(_header(root, path, n, 0)) + n + _padding(n) for path, n in sizes)
    return body + END_BLOCKS * tarfile.BLOCKSIZE


def tar_pieces(root: str, members: list[tuple[str, Path]], mtime: int) -> Iterator[bytes]:
    """Yield the .tar piece by piece, at most one piece of one file at a time."""
    for path, file in members:
        size = file.stat().st_size
        yield _header(root, path, size, mtime)
        with file.open("rb") as source:
            while piece := source.read(PIECE_BYTES):
                yield piece
        yield b"\0" * _padding(size)
    yield b"\0" * END_BLOCKS * tarfile.BLOCKSIZE


async def in_threads(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the pieces without blocking the event loop while the disk is read."""

    def read() -> bytes | None:
        return next(pieces, None)

    while (piece := await sync_to_async(read, thread_sensitive=False)()) is not None:
        yield piece
