"""Take a file of training data, look through it, keep it, and let it go again."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from django.conf import settings
from django.contrib.auth.models import User
from django.core.files.uploadedfile import UploadedFile
from django.db import transaction

from runners.datasets.checking import Checked, checked
from runners.datasets.records import DataError
from runners.jobspec import TrainSpec
from runners.jobspec.data import MAX_UPLOAD_BYTES, UploadedData, uploads_of
from webapp.accounts.models import Team
from webapp.core.clock import now
from webapp.core.disk import MIN_FREE_BYTES, check_room
from webapp.core.ids import new_ulid
from webapp.core.problems import (
    ConflictProblem,
    InvalidProblem,
    NotFoundProblem,
    TooLargeProblem,
)
from webapp.datasets.models import Dataset
from webapp.hosts.models import Host
from webapp.jobs.models import FINAL_STATES, Attempt, Event, Job

MAX_TEAM_BYTES = 2 * 1024**3
MAX_TEAM_FILES = 200
MEBIBYTE = 1024**2
PIECE_BYTES = 1024 * 1024


class UnusableDataError(Exception):
    """A file that nothing can be trained on, and what is in it all the same."""

    def __init__(self, found: Checked) -> None:
        super().__init__(found.errors[0])
        self.found = found


class _Kept(NamedTuple):
    path: Path
    sha256: str
    size_bytes: int


def path_of(dataset: Dataset) -> Path:
    """Return where a dataset's file lies."""
    return Path(settings.DATASETS_DIR) / dataset.pk


def dataset_store(*, team: Team, by: User, upload: UploadedFile[Any]) -> Dataset:
    """Keep an uploaded file; the same one under the same name is kept once.

    Raises:
        UnusableDataError: one of its lines cannot be learnt from, or there are too few.
        InvalidProblem: its name or its kind is none that is read.
        TooLargeProblem: it, or the team's files together, exceed a limit.
        BusyProblem: the disk is nearly full.
    """
    name = PurePosixPath(str(upload.name or "").replace("\\", "/")).name[:200]
    _check_size(team, name, upload.size or 0)
    folder = Path(settings.DATASETS_DIR)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_room(folder, MIN_FREE_BYTES + (upload.size or 0))
    kept = _keep(folder, upload)
    try:
        return _store(team, by, name, kept, _checked(name, kept.path))
    finally:
        kept.path.unlink(missing_ok=True)


def _check_size(team: Team, name: str, size_bytes: int) -> None:
    if size_bytes > MAX_UPLOAD_BYTES:
        raise TooLargeProblem(
            "dataset_too_large",
            f"{name} has {-(-size_bytes // MEBIBYTE):,} MiB; {MAX_UPLOAD_BYTES // MEBIBYTE} MiB "
            "are taken. Divide it, or copy it to the host and name its path.",
        )
    held = list(Dataset.objects.filter(team=team).values_list("size_bytes", flat=True))
    if len(held) >= MAX_TEAM_FILES or sum(held) + size_bytes > MAX_TEAM_BYTES:
        raise TooLargeProblem(
            "datasets_full",
            f"The team keeps {len(held)} files of {sum(held) // MEBIBYTE:,} MiB; {MAX_TEAM_FILES} "
            f"files and {MAX_TEAM_BYTES // MEBIBYTE:,} MiB are the limits. Delete some first.",
        )


def _keep(folder: Path, upload: UploadedFile[Any]) -> _Kept:
    """Write an upload aside, with its digest taken on the way."""
    path, digest, size = folder / f".{new_ulid()}.part", hashlib.sha256(), 0
    with path.open("xb") as sink:
        for piece in upload.chunks(PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
            sink.write(piece)
        sink.flush()
        os.fsync(sink.fileno())
    return _Kept(path, digest.hexdigest(), size)


def _checked(name: str, path: Path) -> Checked:
    try:
        with path.open("rb") as file:
            found = checked(file, name)
    except DataError as error:
        raise InvalidProblem("dataset_kind", f"{error}.") from None
    if found.errors:
        raise UnusableDataError(found)
    return found


@transaction.atomic
def _store(team: Team, by: User, name: str, kept: _Kept, found: Checked) -> Dataset:
    known = Dataset.objects.filter(team=team, name=name, sha256=kept.sha256).first()
    if known is not None:
        return known
    dataset: Dataset = Dataset.objects.create(
        team=team,
        name=name,
        sha256=kept.sha256,
        size_bytes=kept.size_bytes,
        num_records=found.num_records,
        format=found.format or "",
        samples=[[list(part) for part in sample] for sample in found.samples],
        uploaded_by=by,
    )
    kept.path.replace(path_of(dataset))
    _record(dataset, "dataset.upload", by)
    return dataset


def dataset_delete(*, dataset: Dataset, by: User) -> None:
    """Delete a dataset and its file.

    Raises:
        ConflictProblem: a job that has not ended needs it.
    """
    waiting = Job.objects.filter(team=dataset.team_id).exclude(state__in=FINAL_STATES)
    for job in waiting.filter(spec__kind="train"):
        if any(each.dataset_id == dataset.pk for each in uploads_in(job)):
            raise ConflictProblem(
                "dataset_in_use", f"“{job.name}” needs {dataset.name}; stop it, or let it end."
            )
    path = path_of(dataset)
    with transaction.atomic():
        _record(dataset, "dataset.delete", by)
        dataset.delete()
    path.unlink(missing_ok=True)


def uploads_in(job: Job) -> tuple[UploadedData, ...]:
    """Return the uploads that a job reads."""
    if job.spec.get("kind") != "train":
        return ()
    return uploads_of(TrainSpec.model_validate(job.spec).data)


def promised_dataset(attempt_id: str, host: Host, dataset_id: str) -> Dataset:
    """Return a dataset that the job of a claimed attempt of this host names.

    Raises:
        NotFoundProblem: it names no such one, or its team has none any more.
    """
    own = Attempt.objects.filter(pk=attempt_id, host=host, ended_at=None).exclude(claim_id="")
    attempt = own.select_related("job").first()
    if attempt is not None and dataset_id in {each.dataset_id for each in uploads_in(attempt.job)}:
        found = Dataset.objects.filter(team=attempt.job.team_id, pk=dataset_id).first()
        if found is not None:
            return found
    raise NotFoundProblem("no_dataset", "The training data was deleted, or was never promised.")


def pieces(path: Path) -> Iterator[bytes]:
    """Yield a file piece by piece."""
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
