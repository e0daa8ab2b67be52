"""Uploaded files of training data: checked, stored, read."""

import hashlib
import os
import unicodedata
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any, NamedTuple

from django.conf import settings
from django.contrib.auth.models import User
from django.core.files.uploadedfile import UploadedFile
from django.db import transaction

from planner.specs.units import MIB
from runners.datasets.conversations import DataError
from runners.datasets.records import FileSummary, check_file
from runners.jobspec.base import MAX_UPLOAD_BYTES
from webapp.accounts.models import Team
from webapp.audit.models import event_record
from webapp.core.ids import new_ulid
from webapp.core.names import checked_name
from webapp.core.outages import MIN_FREE_BYTES, check_room
from webapp.core.problems import (
    BusyProblem,
    InvalidProblem,
    TooLargeProblem,
)
from webapp.datasets.models import Dataset

MAX_TEAM_BYTES = 2 * 1024**3
MAX_TEAM_FILES = 200
MAX_NAME, MAX_ENDING = 200, 20  # characters, as the column holds them
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


def stored_name(name: str) -> str:
    """Return the file name of an upload in at most ``MAX_NAME`` characters, with its ending.

    Accents are composed: macOS sends them apart, and the same name would be another.
    """
    path = PurePosixPath(unicodedata.normalize("NFC", name).replace("\\", "/"))
    ending = path.suffix[-MAX_ENDING:]
    return (
        path.name if len(path.name) <= MAX_NAME else path.stem[: MAX_NAME - len(ending)] + ending
    )


def dataset_store(*, team: Team, by: User, upload: UploadedFile[Any]) -> Dataset:
    """Store an uploaded file; the same file under the same name is stored once.

    Raises:
        UnusableDataError: a record is invalid, or there are too few records.
        InvalidProblem: the file type is not supported.
        TooLargeProblem: the file, or the team's files together, exceed a limit.
        BusyProblem: the disk is nearly full, or enough uploads are being checked.
    """
    name = stored_name(checked_name(str(upload.name or ""), "file"))
    _check_size(team, name, upload.size or 0)
    with _CHECKS.of(by):
        return _store_checked(team, by, name, upload)


class ConcurrentChecks:
    """How many uploads are checked at once, of one person and of all, in this process.

    A check reads every record, which takes minutes for a large file, in a thread that pages need.
    """

    MOST_OF_ONE, MOST = 2, 6
    RETRY_SECONDS = 30

    def __init__(self) -> None:
        self._lock = Lock()
        self._running: Counter[int] = Counter()

    @contextmanager
    def of(self, person: User) -> Iterator[None]:
        """Hold a place for a check.

        Raises:
            BusyProblem: the person, or all together, have as many checks as there may be.
        """
        with self._lock:
            own, every = self._running[person.pk], self._running.total()
            if own >= self.MOST_OF_ONE or every >= self.MOST:
                whose = (
                    f"{own} uploads of yours" if own >= self.MOST_OF_ONE else f"{every} uploads"
                )
                raise BusyProblem(
                    "uploads_busy",
                    f"{whose} are being checked at the moment; upload this file when one of them "
                    "is done.",
                    retry_after_seconds=self.RETRY_SECONDS,
                )
            self._running[person.pk] += 1
        try:
            yield
        finally:
            with self._lock:
                self._running[person.pk] -= 1
                self._running += Counter()  # without those at zero


_CHECKS = ConcurrentChecks()


def _store_checked(team: Team, by: User, name: str, upload: UploadedFile[Any]) -> Dataset:
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
            f"{name} has {-(-size_bytes // MIB):,} MiB; the limit is "
            f"{MAX_UPLOAD_BYTES // MIB} MiB. Divide the file, or copy it to the host and "
            "give its path.",
        )
    used = list(Dataset.objects.filter(team=team).values_list("size_bytes", flat=True))
    if len(used) >= MAX_TEAM_FILES or sum(used) + size_bytes > MAX_TEAM_BYTES:
        raise TooLargeProblem(
            "datasets_full",
            f"The team keeps {len(used)} files of {sum(used) // MIB:,} MiB; {MAX_TEAM_FILES} "
            f"files and {MAX_TEAM_BYTES // MIB:,} MiB are the limits. Delete a file first.",
        )


def _write_upload(folder: Path, upload: UploadedFile[Any]) -> _StoredUpload:
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
            check = check_file(file, name)
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
        num_empty=check.num_empty,
        left_out=dict(check.left_out),
        samples=[[list(part) for part in sample] for sample in check.samples],
        uploaded_by=by,
    )
    written.path.replace(path_of(dataset))
    change_record(dataset, "dataset.upload", by)
    return dataset


def file_chunks(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in chunks."""
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def change_record(dataset: Dataset, kind: str, by: User) -> None:
    event_record(
        dataset,
        kind,
        by.get_username()[:80],
        detail={
            "name": dataset.name,
            "sha256": dataset.sha256,
            "bytes": dataset.size_bytes,
            "records": dataset.num_records,
        },
    )
