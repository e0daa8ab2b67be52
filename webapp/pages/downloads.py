"""Downloads of a job: an artefact as a streamed .tar, its log as text, its figures."""

import csv
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from pathlib import Path

from asgiref.sync import sync_to_async
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.views.decorators.http import require_GET

from webapp.core.clock import now
from webapp.core.display import cell
from webapp.core.parameters import reads_query
from webapp.jobs.artefacts import PIECE_BYTES, folder_of, path_inside
from webapp.jobs.lookup import load_job
from webapp.jobs.measured_figures import as_json, figures_of
from webapp.jobs.models import Artefact, Job
from webapp.jobs.targets import target_json, targets_of
from webapp.pages.attempt_log import PARAMETER, Line, log_of, shown_part

END_BLOCKS = 2
LINES_AT_ONCE = 200
MODE = 0o644


@require_GET
def job_download(request: HttpRequest, job_id: str, name: str) -> StreamingHttpResponse:
    """Stream a complete artefact of the job's current attempt as a .tar file."""
    return artefact_response(load_job(request, job_id), name)


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


async def in_threads(
    pieces: Iterator[bytes], *, is_one_thread: bool = False
) -> AsyncIterator[bytes]:
    """Yield the chunks, reading them in threads so that the event loop is not blocked.

    With ``is_one_thread`` it is the request's own thread, which has the database's connection.
    """

    def read() -> bytes | None:
        return next(pieces, None)

    while (piece := await sync_to_async(read, thread_sensitive=is_one_thread)()) is not None:
        yield piece


# The log as a text file: every line in full, with its time (UTC) and its stream.


@require_GET
@reads_query(PARAMETER)
def job_log(request: HttpRequest, job_id: str) -> StreamingHttpResponse:
    """Stream the log of the job's current attempt on the host of ``?host=`` as text."""
    job = load_job(request, job_id)
    shown = shown_part(request, job)
    chunks = in_threads(_log_chunks(log_of(shown)), is_one_thread=True)
    response = StreamingHttpResponse(chunks, content_type="text/plain; charset=utf-8")
    rank = f"-host-{shown.node_rank}" if shown and shown.node_rank else ""
    name = f"{file_name(job.name)}{rank}.log"
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


def _log_chunks(lines: Iterator[Line]) -> Iterator[bytes]:
    while some := list(islice(lines, LINES_AT_ONCE)):
        yield "".join(
            f"{line.at:%Y-%m-%dT%H:%M:%S}Z {line.stream}: {line.text}\n" for line in some
        ).encode(errors="replace")


# Export a job's figures as files: the same values as its page and the API, not rounded.


@require_GET
def job_figures(request: HttpRequest, job_id: str, form: str) -> HttpResponse:
    """Send a job's figures as ``csv`` or ``json``, in base units."""
    job = load_job(request, job_id)
    if form not in FORMS:
        raise Http404(f"Figures are exported as {' or '.join(FORMS)}, not as {form[:20]}.")
    response = FORMS[form](job)
    name = f"{file_name(job.name)}-figures.{form}"
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


def _csv(job: Job) -> HttpResponse:
    response = HttpResponse(content_type="text/csv; charset=utf-8")
    rows = [as_json(each) for each in figures_of(job).values()]
    if rows:
        writer = csv.DictWriter(response, list(rows[0]))
        writer.writeheader()
        writer.writerows({key: _plain(value) for key, value in row.items()} for row in rows)
    return response


def _plain(value: object) -> object:
    """Return a value that spreadsheets do not interpret as a formula: names come from hosts."""
    return cell(value) if isinstance(value, str) else value


def _json(job: Job) -> HttpResponse:
    job_figures_by_name = figures_of(job)
    figures = [as_json(each) for each in job_figures_by_name.values()]
    targets = [target_json(each) for each in targets_of(job, job_figures_by_name)]
    head = {"job": job.pk, "state": job.state, "as_of": now().isoformat()}
    return JsonResponse({**head, "figures": figures, "targets": targets})


FORMS: dict[str, Callable[[Job], HttpResponse]] = {"csv": _csv, "json": _json}
