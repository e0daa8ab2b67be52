"""Data files of a team, and their pages."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.models import User
from django.core.files.uploadedfile import UploadedFile
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_POST

from runners.datasets.records import DataError, FileSummary, checked
from runners.jobspec import TrainSpec
from runners.jobspec.base import MAX_UPLOAD_BYTES, UploadedData, uploads_of
from webapp.accounts.models import Role, Team
from webapp.accounts.services import (
    check_role,
    current_role,
    current_team,
    is_at_least,
    membership_of,
    require_role,
    signed_in,
    visible_or_404,
)
from webapp.core.clock import now
from webapp.core.ids import new_ulid
from webapp.core.outages import MIN_FREE_BYTES, check_room
from webapp.core.problems import (
    ConflictProblem,
    InvalidProblem,
    NotFoundProblem,
    Problem,
    TooLargeProblem,
)
from webapp.datasets.models import Dataset
from webapp.hosts.models import Host
from webapp.jobs.models import FINAL_STATES, Attempt, Event, Job

# ---------------------------------------------------------------------------
# Upload, check, serve and delete files of training data.
# ---------------------------------------------------------------------------


MAX_TEAM_BYTES = 2 * 1024**3
MAX_TEAM_FILES = 200
MEBIBYTE = 1024**2
PIECE_BYTES = 1024 * 1024


class UnusableDataError(Exception):
    """A file that cannot be used for training, with the result of its check."""

    def __init__(self, found: FileSummary) -> None:
        super().__init__(found.errors[0])
        self.found = found


class _StoredUpload(NamedTuple):
    path: Path
    sha256: str
    size_bytes: int


def path_of(dataset: Dataset) -> Path:
    """Return the path of a dataset's file."""
    return Path(settings.DATASETS_DIR) / dataset.pk


def dataset_store(*, team: Team, by: User, upload: UploadedFile[Any]) -> Dataset:
    """Store an uploaded file; the same file under the same name is stored once.

    Raises:
        UnusableDataError: a record is invalid, or there are too few records.
        InvalidProblem: the file type is not supported.
        TooLargeProblem: the file, or the team's files together, exceed a limit.
        BusyProblem: the disk is nearly full.
    """
    name = PurePosixPath(str(upload.name or "").replace("\\", "/")).name[:200]
    _check_size(team, name, upload.size or 0)
    folder = Path(settings.DATASETS_DIR)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_room(folder, MIN_FREE_BYTES + (upload.size or 0))
    written = _write_upload(folder, upload)
    try:
        return _store(team, by, name, written, _checked(name, written.path))
    finally:
        written.path.unlink(missing_ok=True)


def _check_size(team: Team, name: str, size_bytes: int) -> None:
    if size_bytes > MAX_UPLOAD_BYTES:
        raise TooLargeProblem(
            "dataset_too_large",
            f"{name} has {-(-size_bytes // MEBIBYTE):,} MiB; {MAX_UPLOAD_BYTES // MEBIBYTE} MiB "
            "are the limit. Divide the file, or copy it to the host and name its path.",
        )
    used = list(Dataset.objects.filter(team=team).values_list("size_bytes", flat=True))
    if len(used) >= MAX_TEAM_FILES or sum(used) + size_bytes > MAX_TEAM_BYTES:
        raise TooLargeProblem(
            "datasets_full",
            f"The team keeps {len(used)} files of {sum(used) // MEBIBYTE:,} MiB; {MAX_TEAM_FILES} "
            f"files and {MAX_TEAM_BYTES // MEBIBYTE:,} MiB are the limits. Delete some first.",
        )


def _write_upload(folder: Path, upload: UploadedFile[Any]) -> _StoredUpload:
    """Write an upload to a temporary file and compute its digest."""
    path, digest, size = folder / f".{new_ulid()}.part", hashlib.sha256(), 0
    try:
        with path.open("xb") as sink:
            for piece in upload.chunks(PIECE_BYTES):
                digest.update(piece)
                size += len(piece)
                sink.write(piece)
            sink.flush()
            os.fsync(sink.fileno())
    except OSError:
        path.unlink(missing_ok=True)  # a partial file would keep a full disk full
        raise
    return _StoredUpload(path, digest.hexdigest(), size)


def _checked(name: str, path: Path) -> FileSummary:
    try:
        with path.open("rb") as file:
            check = checked(file, name)
    except DataError as error:
        raise InvalidProblem("dataset_kind", f"{error}.") from None
    if check.errors:
        raise UnusableDataError(check)
    return check


@transaction.atomic
def _store(team: Team, by: User, name: str, written: _StoredUpload, check: FileSummary) -> Dataset:
    existing = Dataset.objects.filter(team=team, name=name, sha256=written.sha256).first()
    if existing is not None:
        return existing
    dataset: Dataset = Dataset.objects.create(
        team=team,
        name=name,
        sha256=written.sha256,
        size_bytes=written.size_bytes,
        num_records=check.num_records,
        format=check.format or "",
        samples=[[list(part) for part in sample] for sample in check.samples],
        uploaded_by=by,
    )
    written.path.replace(path_of(dataset))
    _record(dataset, "dataset.upload", by)
    return dataset


def dataset_delete(*, dataset: Dataset, by: User) -> None:
    """Delete a dataset and its file.

    Raises:
        ConflictProblem: a job that has not ended uses it.
    """
    waiting = Job.objects.filter(team=dataset.team_id).exclude(state__in=FINAL_STATES)
    for job in waiting.filter(spec__kind="train"):
        if any(each.dataset_id == dataset.pk for each in uploads_in(job)):
            raise ConflictProblem(
                "dataset_in_use",
                f"{dataset.name} cannot be deleted while the job “{job.name}” uses it. "
                "Stop that job or wait for its end, then delete the file.",
            )
    path = path_of(dataset)
    with transaction.atomic():
        _record(dataset, "dataset.delete", by)
        dataset.delete()
    path.unlink(missing_ok=True)


def uploads_in(job: Job) -> tuple[UploadedData, ...]:
    """Return the uploaded datasets that a job reads."""
    if job.spec.get("kind") != "train":
        return ()
    return uploads_of(TrainSpec.model_validate(job.spec).data)


def promised_dataset(attempt_id: str, host: Host, dataset_id: str) -> Dataset:
    """Return a dataset named by the job of a claimed attempt of this host.

    Raises:
        NotFoundProblem: the job does not name it, or it was deleted.
    """
    attempts = Attempt.objects.filter(pk=attempt_id, host=host, ended_at=None).exclude(claim_id="")
    attempt = attempts.select_related("job").first()
    if attempt is not None and dataset_id in {each.dataset_id for each in uploads_in(attempt.job)}:
        dataset = Dataset.objects.filter(team=attempt.job.team_id, pk=dataset_id).first()
        if dataset is not None:
            return dataset
    raise NotFoundProblem(
        "no_dataset", "The training data was deleted, or the job does not name it."
    )


def file_chunks(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in chunks."""
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def _record(dataset: Dataset, kind: str, by: User) -> None:
    Event.objects.create(
        at=now(),
        team_id=dataset.team_id,
        kind=kind,
        subject=dataset.pk,
        actor=by.get_username()[:80],
        detail={
            "name": dataset.name,
            "sha256": dataset.sha256,
            "bytes": dataset.size_bytes,
            "records": dataset.num_records,
        },
    )


# ---------------------------------------------------------------------------
# The page of a team's training data: list, contents, upload and deletion.
# ---------------------------------------------------------------------------


UNPROCESSABLE = 422
PAGE = "dataset-list"


@require_GET
def dataset_list(request: HttpRequest) -> HttpResponse:
    """List the team's training data, with the upload form."""
    return render(request, "datasets/list.html", _context(request))


def _context(
    request: HttpRequest, found: FileSummary | None = None, name: str = ""
) -> dict[str, object]:
    team = current_team(request)
    return {
        "team": team,
        "datasets": Dataset.objects.filter(team=team).select_related("uploaded_by"),
        "may_change": is_at_least(current_role(request), Role.PRACTITIONER),
        "upload_url": reverse("dataset-upload"),
        "limit_bytes": MAX_UPLOAD_BYTES,
        "found": found,
        "found_name": name,
    }


@require_POST
@require_role(Role.PRACTITIONER)
def dataset_upload(request: HttpRequest) -> HttpResponse:
    """Store an uploaded file; show the errors of an unusable one."""
    stored = taken(request, current_team(request))
    if isinstance(stored, HttpResponse):
        return stored
    if stored is not None:
        messages.success(
            request, f"{stored.name} is here: {stored.num_records:,} records. Choose it in a plan."
        )
    return redirect(PAGE)


def taken(request: HttpRequest, team: Team) -> Dataset | HttpResponse | None:
    """Return the stored dataset, an error page, or None after adding an error message."""
    upload = request.FILES.get("file")
    if not isinstance(upload, UploadedFile):
        messages.error(request, "No file was chosen: pick one, or drop it on the field.")
        return None
    try:
        return dataset_store(team=team, by=signed_in(request), upload=upload)
    except UnusableDataError as error:
        context = _context(request, error.found, str(upload.name))
        return render(request, "datasets/list.html", context, status=UNPROCESSABLE)
    except Problem as problem:
        messages.error(request, problem.detail)
        return None


@require_POST
def dataset_remove(request: HttpRequest, dataset_id: str) -> HttpResponse:
    """Delete a dataset of the team."""
    dataset = visible_or_404(Dataset, request.user, pk=dataset_id)
    membership = membership_of(request.user, dataset.team)
    check_role(Role(membership.role) if membership else Role.VIEWER, Role.PRACTITIONER)
    dataset_delete(dataset=dataset, by=signed_in(request))
    messages.success(request, f"{dataset.name} is deleted.")
    return redirect(PAGE)
