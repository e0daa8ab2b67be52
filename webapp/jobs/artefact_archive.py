"""A complete artefact of a job as a streamed .tar file."""

import tarfile
from collections.abc import Iterator
from pathlib import Path

from django.http import Http404, StreamingHttpResponse

from webapp.core.streaming import in_threads
from webapp.jobs.artefacts import PIECE_BYTES, folder_of, path_inside
from webapp.jobs.models import Artefact, Job

END_BLOCKS = 2
MODE = 0o644


def artefact_response(job: Job, name: str) -> StreamingHttpResponse:
    """Return a complete artefact of a job's current attempt as a .tar file.

    Raises:
        Http404: there is none of this name, or its files are gone.
    """
    artefact = _complete_artefact(job, name)
    members = [(path, path_inside(folder_of(artefact), path)) for path in sorted(artefact.files)]
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
