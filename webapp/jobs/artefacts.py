"""Files of a job: logs, artefacts, exported figures; the parts of its page."""

import csv
import hashlib
import re
import tarfile
from collections.abc import (
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol, cast

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import reverse
from django.views.decorators.http import require_GET

from runners.shared.reasons import STOPPED, Reason
from webapp.core.clock import now
from webapp.core.display import capitalised, cell, clock, memory
from webapp.core.outages import check_room
from webapp.core.problems import (
    ConflictProblem,
    InvalidProblem,
    NotFoundProblem,
    TooLargeProblem,
)
from webapp.hosts.models import Host
from webapp.hosts.services import Contact, contact_of, silent_seconds
from webapp.jobs.allocation import MAX_PREFLIGHTS
from webapp.jobs.gangs import members_of
from webapp.jobs.listing import target_json, targets_of
from webapp.jobs.lookup import load_job
from webapp.jobs.measured_figures import as_json, figures_of
from webapp.jobs.models import Artefact, Attempt, AttemptEvent, Event, Job, JobState
from webapp.live.stream import publish

# ---------------------------------------------------------------------------
# Artefacts of attempts: uploaded in parts, verified by digest, downloaded as a .tar.
# ---------------------------------------------------------------------------


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
        raise InvalidProblem("bad_path", f"The path {path!r} leads out of the artefact's folder.")
    if "\x00" in path or "\\" in path:
        raise InvalidProblem(
            "bad_path", f"The path {path!r} holds a character that file names cannot have."
        )
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


# ---------------------------------------------------------------------------
# Export a job's figures as files: the same values as its page and the API, not rounded.
# ---------------------------------------------------------------------------


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


# ---------------------------------------------------------------------------
# An attempt's log, and its preflight checklists, from the job's events.
# ---------------------------------------------------------------------------


SUPERVISOR = "supervisor"
MOST_CHARACTERS = 256 * 1024  # of all lines read at once
LINE_CHARACTERS = 2000  # per line; longer lines are shortened
EVENTS_AT_ONCE = 100  # rows per database read: one may hold 64 KiB
LEVELS = (("error", "bad"), ("traceback", "bad"), ("critical", "bad"), ("warn", "warn"))


@dataclass(frozen=True)
class Line:
    """One line of output; ``seq`` is the number of its event."""

    seq: int
    at: datetime
    stream: str
    text: str

    @property
    def level(self) -> str:
        """Return ``bad``, ``warn`` or nothing, by keywords in the line."""
        text = self.text.lower()
        return next((look for word, look in LEVELS if word in text), "")


def log_lines(attempt: Attempt | None, *, limit: int, needle: str = "") -> list[Line]:
    """Return the last ``limit`` lines of an attempt, or of its lines that contain ``needle``.

    Fewer if they exceed ``MOST_CHARACTERS`` in total.
    """
    if attempt is None:
        return []
    events = AttemptEvent.objects.filter(attempt=attempt, kind__in=LOG_KINDS).order_by("-seq")
    stored = cast(
        "Generator[AttemptEvent, None, None]", events.iterator(chunk_size=EVENTS_AT_ONCE)
    )
    with closing(stored) as rows:
        newest_first = (
            line
            for event in rows
            for line in reversed(list(lines_of(event)))
            if needle.lower() in line.text.lower()
        )
        return list(_bounded(islice(newest_first, limit)))[::-1]


def is_full(lines: Sequence[Line], limit: int) -> bool:
    """Return whether ``log_lines`` may have omitted older lines."""
    return len(lines) >= limit or sum(len(line.text) for line in lines) >= MOST_CHARACTERS


def _bounded(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield lines up to the total character limit."""
    num_characters = 0
    for line in lines:
        yield line
        num_characters += len(line.text)
        if num_characters >= MOST_CHARACTERS:
            return


def lines_of(event: AttemptEvent) -> Iterable[Line]:
    """Return the lines of one event; of progress-bar updates only the last state."""
    at = datetime.fromtimestamp(event.t_ms / 1000, tz=UTC)
    if event.kind in _NOTES:
        yield Line(event.seq, at, SUPERVISOR, _note(event))
        return
    stream = str(event.body.get("stream", "stdout"))
    text = str(event.body.get("text", ""))
    for line in text.removesuffix("\n").split("\n") if text else ():
        yield Line(event.seq, at, stream, _shortened(line.rstrip("\r").rpartition("\r")[2]))


def _shortened(line: str) -> str:
    if len(line) <= LINE_CHARACTERS:
        return line
    return f"{line[:LINE_CHARACTERS]} … (a line of {len(line):,} characters)"


def _note(event: AttemptEvent) -> str:
    """Return the text of a supervisor event; invalid bodies are stored too."""
    try:
        return _NOTES[event.kind](event.body)
    except (ArithmeticError, TypeError, ValueError):
        return f"“{event.kind}”, with figures that make no sense"


def _exit_words(body: Mapping[str, Any]) -> str:
    if body.get("signal"):
        return f"ended by signal {body['signal']}"
    return f"ended with exit code {body.get('exit_code')}"


_NOTES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "started": lambda body: f"process {body.get('pid')} started",
    "phase": lambda body: str(body.get("name", "")),
    "artefact": lambda body: f"saved {body.get('name')}, {memory(body.get('total_bytes', 0))}",
    "exited": _exit_words,
}
LOG_KINDS = ("log", *_NOTES)


# Preflight checklists for a page, from the job's events.


@dataclass(frozen=True)
class ChecklistLine:
    """One line of a checklist."""

    name: str
    is_ok: bool
    sentence: str
    remedy: str

    @property
    def status(self) -> str:
        """Return the status that selects the line's icon."""
        return "ready" if self.is_ok else "failed"


@dataclass(frozen=True)
class CheckRun:
    """One run of the preflight checks: title, time, and every check."""

    title: str
    at: datetime
    checks: tuple[ChecklistLine, ...]


@dataclass(frozen=True)
class Preflight:
    """The state of a job's preflight: a sentence, and the latest check runs."""

    sentence: str
    looks: tuple[CheckRun, ...]


def checks_of(event: Event) -> tuple[ChecklistLine, ...]:
    """Return the checks of an event: failed ones first, then those with advice."""
    checks = [
        ChecklistLine(
            capitalised(str(check.get("name", ""))),
            bool(check.get("ok")),
            str(check.get("sentence", "")),
            str(check.get("remedy", "")),
        )
        for check in event.detail.get("checks", ())
    ]
    return tuple(sorted(checks, key=lambda check: (check.is_ok, not check.remedy)))


def preflight_of(job: Job, events: Sequence[Event]) -> Preflight | None:
    """Return the preflight of a job in preflight or returned from it, else None."""
    is_back = job.state == JobState.QUEUED or job.reason == Reason.PREFLIGHT_FAILED
    check_events = [event for event in events if event.kind == "job.state" and event.detail]
    check_events = [event for event in check_events if event.detail.get("checks")]
    if not check_events or not (is_back or job.state == JobState.PREFLIGHT):
        return None
    last = check_events[-1]
    if job.state == JobState.PREFLIGHT:
        sentence = (
            f"By its last heartbeat {_host(job)} passes. The host now runs its own checks, then "
            "the job starts."
        )
        return Preflight(sentence, (_check_run(last),))
    return Preflight(_outcome(job, events), (_check_run(last),))


def _host(job: Job) -> str:
    return job.place


def _outcome(job: Job, events: Sequence[Event]) -> str:
    failed = sum(1 for event in events if event.reason == Reason.PREFLIGHT_FAILED)
    if job.state == JobState.QUEUED:
        return f"Try {failed} of {MAX_PREFLIGHTS} failed; the next attempt is in half a minute."
    return f"{failed} tries failed, so the job ended. Mend this and clone it."


def _check_run(event: Event) -> CheckRun:
    by_host = event.actor.startswith("host:")
    title = "Checked by the host" if by_host else "By the host's last heartbeat"
    return CheckRun(title, event.at, checks_of(event))


# ---------------------------------------------------------------------------
# The parts of a gang job, one per host, and the part that a page shows.
# ---------------------------------------------------------------------------


PARAMETER = "host"  # query parameter: rank of the host, from 0
NUMBER = re.compile(r"[0-9]{1,4}")


@dataclass(frozen=True)
class Part:
    """One host of a job in the page's host selector."""

    attempt: Attempt
    url: str
    is_current: bool

    @property
    def words(self) -> str:
        """Return the part's state, where it adds to the job's own state."""
        reason = str(self.attempt.exit_record.get("reason") or "")
        if reason:
            return "ended well" if reason == "ok" else reason.replace("_", " ")
        if self.is_silent:
            return f"silent {clock(silent_seconds(self.attempt.host) or 0)}"
        return "running" if self.attempt.started_at else "not started"

    @property
    def is_silent(self) -> bool:
        """Return whether the host is unreachable while the part is open."""
        is_open = self.attempt.ended_at is None and bool(self.attempt.claimed_at)
        return is_open and contact_of(self.attempt.host) is Contact.UNREACHABLE

    @property
    def tone(self) -> str:
        """Return the CSS tone of the state."""
        reason = self.attempt.exit_record.get("reason")
        if self.is_silent:
            return "warn"
        if reason in {None, "", Reason.OK}:
            return ""
        return "quiet" if reason in STOPPED else "bad"


def part_at(job: Job, rank: int) -> Attempt | None:
    """Return the job's current attempt on host ``rank``; None if it has no attempt.

    Raises:
        InvalidProblem: the job runs on fewer hosts.
    """
    leader = job.current_attempt
    if leader is None or rank == 0:
        return leader
    part = leader.members.filter(node_rank=rank).select_related("host").first()
    if part is None:
        raise InvalidProblem(
            "no_such_host", f"{PARAMETER} is {rank}; the job runs on {job.num_hosts}, from 0 on."
        )
    return part


def rank_of(request: HttpRequest) -> int:
    """Return the host rank in the query string; 0 if it is invalid."""
    value = request.GET.get(PARAMETER, "0")
    return int(value) if NUMBER.fullmatch(value) else 0


def shown_part(request: HttpRequest, job: Job) -> Attempt | None:
    """Return the requested part; the first if it does not exist."""
    try:
        return part_at(job, rank_of(request))
    except InvalidProblem:
        return job.current_attempt


def parts_for(job: Job, shown: Attempt | None, page: str) -> list[Part]:
    """Return the selectable hosts; empty if there is only one."""
    if job.num_hosts == 1 or job.current_attempt is None or shown is None:
        return []
    address = reverse(page, args=[job.pk])
    return [
        Part(each, f"{address}?{PARAMETER}={each.node_rank}", each.pk == shown.pk)
        for each in members_of(job.current_attempt)
    ]
