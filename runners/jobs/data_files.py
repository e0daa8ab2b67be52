"""The files of data that a job reads: of a host's folder, uploaded, or of a data set."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from runners.datasets.records import Format, Reader, Record, files_in
from runners.jobs.model_files import model_roots, open_file
from runners.jobs.runtime import Job, MissingModelError
from runners.jobspec import DownloadedData, FileData, UploadedData
from runners.jobspec.base import DATA_FOLDER, renames_of

READ_BYTES = 2**20


@dataclass(frozen=True)
class DataFile:
    """An opened file and its display name; the handle stays open.

    ``files``: by their own names, where there are several, which are read one after the other.
    ``columns`` and ``most_records``: as of ``DataOptions``.
    """

    name: str
    file: BinaryIO
    format: Format | None = None
    files: tuple[tuple[str, BinaryIO], ...] = ()
    columns: tuple[str, ...] = ()
    most_records: int | None = None

    def digest(self) -> str:
        """Return the SHA-256 of the file, or of all files one after the other."""
        digest = hashlib.sha256()
        for _, file in self._files():
            while piece := file.read(READ_BYTES):
                digest.update(piece)
        return digest.hexdigest()

    def reader(self, form: Format | None = None) -> Reader:
        """Return a reader of the format, by default the file's own.

        Raises:
            DataError: the file type is not supported, or has no columns.
        """
        return Reader(self.name, form or self.format, renames_of(self.columns))

    def records(self, reader: Reader) -> Iterator[Record]:
        """Yield the records of the file, or of all files, from the beginning."""
        yield from islice(self._records(reader), self.most_records)

    def _records(self, reader: Reader) -> Iterator[Record]:
        for reader.name, file in self._files():
            yield from reader.records(file)

    def _files(self) -> Iterator[tuple[str, BinaryIO]]:
        for name, file in self.files or ((self.name, self.file),):
            file.seek(0)
            yield name, file


@contextmanager
def open_source(job: Job, source: FileData | UploadedData | DownloadedData) -> Iterator[DataFile]:
    """Open a source's file: of a host's model folder, or uploaded; or those of a data set.

    Raises:
        MissingModelError: a file does not exist, or lies outside of the host's folders.
    """
    if isinstance(source, DownloadedData):
        with ExitStack() as stack:
            files = tuple(
                (Path(path).name, stack.enter_context(os.fdopen(handle, "rb")))
                for path in source.paths
                for handle in [open_file(Path(path), model_roots(job.host_dir))]
            )
            read = source.columns, source.records
            yield DataFile(source.name, files[0][1], source.format, files, *read)
        return
    columns: tuple[str, ...] = ()
    records: int | None = None
    if isinstance(source, UploadedData):
        folder = job.attempt_dir / DATA_FOLDER
        path, roots, name = folder / source.file_name, [folder], source.name
    else:
        roots = list(model_roots(job.host_dir))
        path, name = (roots[0] / source.path).resolve(), Path(source.path).name
        columns, records = source.columns, source.records
        if path.is_dir() and any(path.is_relative_to(root) for root in roots):
            raise MissingModelError(f"training data {name} is a folder; {files_in(path)}")
    try:
        handle = open_file(path, roots)
    except MissingModelError as error:
        raise MissingModelError(f"training data {name}: {error}") from None
    with os.fdopen(handle, "rb") as file:
        yield DataFile(name, file, source.format, columns=columns, most_records=records)
