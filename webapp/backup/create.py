"""Create a backup while the site runs: a snapshot of each database, then the files.

Files come last: an artefact is complete before its row says so, and never changes afterwards. The
metric store comes after the main database, because ingestion writes in the opposite order: points
beyond those acknowledged in the main database are discarded when hosts send them again.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from django.conf import settings
from django.db import connections

from webapp.backup import database_copies
from webapp.backup.manifest import (
    NAME,
    BackupError,
    Engine,
    KeyCheck,
    Manifest,
    StoredFile,
    digest_of,
    verify,
)
from webapp.core.clock import now
from webapp.core.schema import VERSION
from webapp.core.vault import VARIABLE as SECRETS_VARIABLE
from webapp.jobs.artefacts import PARTIAL_SUFFIX

SECRET_KEY_VARIABLE = "SLIPWAY_SECRET_KEY"  # noqa: S105 (its name)
KEYS = {"secret_key": SECRET_KEY_VARIABLE, "secrets.keys": SECRETS_VARIABLE}
# This machine's credential as a host; without it, it must enrol again.
OWN_HOST = ("host/credential.json", "host/config.json", "host/redis-ca.pem")
DATABASES = "databases"
FILES = "files"  # files of the data folder, under the same relative names
SPARE_BYTES = 64 * 1024**2


class Source(NamedTuple):
    """One file of the data folder that goes into the backup."""

    path: Path
    name: str  # in the backup


def engine() -> Engine:
    """Return the configured kind of database.

    Raises:
        BackupError: it is neither SQLite nor PostgreSQL.
    """
    vendor = connections["default"].vendor
    if vendor == "sqlite":
        return "sqlite"
    if vendor == "postgresql":
        return "postgresql"
    raise BackupError(f"Databases of the kind {vendor} cannot be backed up: use its own tools.")


def database_file(alias: str) -> Path:
    """Return the file of an SQLite database."""
    return Path(settings.DATABASES[alias]["NAME"])


def create(folder: Path, *, with_artefacts: bool = True) -> Manifest:
    """Write a backup to a new folder, verify it, and return its manifest.

    Raises:
        BackupError: the folder exists already, the disk is too small, a part cannot be read, or
            the verification fails. Nothing is left at ``folder`` then.
    """
    kind = engine()
    _check_target(folder)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(mode=0o700, parents=True)
        _check_room(unfinished, with_artefacts=with_artefacts)
        manifest = _write(unfinished, kind, with_artefacts=with_artefacts)
        verify(unfinished)
        check_databases(unfinished, manifest)
        unfinished.rename(folder)
    except OSError as error:
        raise BackupError(f"The backup could not be written to {folder}: {error}.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return manifest


def check_databases(folder: Path, manifest: Manifest) -> None:
    """Check the integrity of the databases of a backup.

    Raises:
        BackupError: a database is damaged.
    """
    if manifest.engine == "postgresql":
        database_copies.check_dump(folder / DATABASES / "default.dump")
        return
    for alias, rows in manifest.rows.items():
        path = folder / DATABASES / f"{alias}.sqlite3"
        if database_copies.check_database(path) != rows:
            raise BackupError(f"{path} does not have the rows that {NAME} states.")


def _check_target(folder: Path) -> None:
    if folder.exists():
        raise BackupError(f"{folder} is there already. Give the name of a new folder.")
    for backed_up in (settings.ARTEFACTS_DIR, settings.DATASETS_DIR):
        if folder.resolve().is_relative_to(Path(backed_up).resolve()):
            raise BackupError(f"{folder} lies in {backed_up}, which is backed up itself.")


def _check_room(folder: Path, *, with_artefacts: bool) -> None:
    needed = sum(source.path.stat().st_size for source in _sources(with_artefacts=with_artefacts))
    if engine() == "sqlite":
        needed += sum(database_file(alias).stat().st_size for alias in settings.DATABASES)
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE_BYTES:
        raise BackupError(
            f"The backup needs about {needed / 1e6:,.0f} MB, and the disk of {folder.parent} has "
            f"{free / 1e6:,.0f} MB free. Choose another disk, or leave artefacts out with "
            "--without-artefacts."
        )


def _write(folder: Path, kind: Engine, *, with_artefacts: bool) -> Manifest:
    made_at = now()
    (folder / DATABASES).mkdir(mode=0o700)
    if kind == "sqlite":
        migrations, rows = _copy_sqlite(folder)
    else:
        dumped = database_copies.dump(folder / DATABASES / "default.dump")
        migrations, rows = dumped.migrations, {"default": dumped.rows}
    files = {
        path.relative_to(folder).as_posix(): digest_of(path)
        for path in sorted((folder / DATABASES).iterdir())
    }
    for source in _sources(with_artefacts=with_artefacts):
        if stored := _copy(source, folder):
            files[source.name] = stored
    manifest = Manifest(
        version=VERSION,
        made_at=made_at,
        engine=kind,
        migrations=migrations,
        rows=rows,
        has_artefacts=with_artefacts,
        environment_keys={
            variable: KeyCheck.of(os.environ[variable])
            for variable in KEYS.values()
            if os.environ.get(variable)
        },
        files=files,
    )
    (folder / NAME).write_text(manifest.model_dump_json(indent=1), "utf-8")
    return manifest


def _copy_sqlite(folder: Path) -> tuple[dict[str, list[str]], dict[str, dict[str, int]]]:
    rows = {}
    for alias in settings.DATABASES:  # the main database first
        target = folder / DATABASES / f"{alias}.sqlite3"
        database_copies.copy_database(database_file(alias), target)
        rows[alias] = database_copies.check_database(target)
    return database_copies.migrations_of(folder / DATABASES / "default.sqlite3"), rows


def _sources(*, with_artefacts: bool) -> Iterator[Source]:
    """Yield the files of the data folder that belong into the backup."""
    data = Path(settings.DATA_DIR)
    keys = [name for name, variable in KEYS.items() if not os.environ.get(variable)]
    for name in (*keys, *OWN_HOST):
        if (data / name).is_file():
            yield Source(data / name, f"{FILES}/{name}")
    yield from _files_below(Path(settings.DATASETS_DIR), "datasets")
    if with_artefacts:
        yield from _files_below(Path(settings.ARTEFACTS_DIR), "artefacts")


def _files_below(folder: Path, name: str) -> Iterator[Source]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.suffix != PARTIAL_SUFFIX:
            yield Source(path, f"{FILES}/{name}/{path.relative_to(folder).as_posix()}")


def _copy(source: Source, folder: Path) -> StoredFile | None:
    """Copy a file and return its digest; None if it was deleted meanwhile."""
    target = folder / source.name
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        shutil.copyfile(source.path, target)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise BackupError(f"{source.path} cannot be read: {error.strerror}.") from error
    target.chmod(0o600)
    return digest_of(source.path) if source.path.exists() else digest_of(target)
