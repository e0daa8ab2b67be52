"""Backups of a site, made while it runs: databases, keys and files, with digests; restore.

Not included: Redis, whose data hosts send again; logs; attempt folders, which are on the hosts.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from django.conf import settings
from django.db import connections

from webapp.core.clock import now
from webapp.core.queries import VERSION, SchemaError, check_migrations
from webapp.core.vault import VARIABLE as SECRETS_VARIABLE
from webapp.jobs.artefacts import PARTIAL_SUFFIX
from webapp.operations import database_copies
from webapp.operations.database_copies import (
    NAME,
    BackupError,
    Engine,
    KeyCheck,
    Manifest,
    StoredFile,
    digest_of,
    verify,
)

# ---------------------------------------------------------------------------
# Create a backup while the site runs: a snapshot of each database, then the files.
#
# Files come last: an artefact is complete before its row says so, and never changes afterwards.
# The metric store comes after the main database, because ingestion writes in the opposite order:
# points beyond those acknowledged in the main database are discarded when hosts send them again.
# ---------------------------------------------------------------------------


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
        BackupError: the database is neither SQLite nor PostgreSQL.
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
    if folder.exists():
        raise BackupError(f"{folder} exists already. Give the name of a new folder.")
    for backed_up in (settings.ARTEFACTS_DIR, settings.DATASETS_DIR):
        if folder.resolve().is_relative_to(Path(backed_up).resolve()):
            raise BackupError(
                f"{folder} lies in {backed_up}, which is backed up itself. Choose a folder "
                "outside it."
            )
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
        rows = {}
        for alias in settings.DATABASES:  # the main database first
            target = folder / DATABASES / f"{alias}.sqlite3"
            database_copies.copy_database(database_file(alias), target)
            rows[alias] = database_copies.check_database(target)
        migrations = database_copies.migrations_of(folder / DATABASES / "default.sqlite3")
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


# ---------------------------------------------------------------------------
# Restore a backup into a stopped site; replaced files are moved aside.
# ---------------------------------------------------------------------------


STAMP = "prepared"  # file of `up` that says that no migration is due
LOCK = "up.lock"


def check(folder: Path) -> Manifest:
    """Return the manifest of a backup, if this version and these settings can restore it.

    Raises:
        BackupError: the backup is damaged, has another schema or another kind of database, or its
            keys differ from those of the environment.
    """
    manifest = verify(folder)
    try:
        way_out = "Restore the backup with the version that created it, or a newer one."
        check_migrations(manifest.migrations, f"The backup (made by {manifest.version})", way_out)
    except SchemaError as error:
        raise BackupError(str(error)) from error
    if manifest.engine != engine():
        raise BackupError(
            f"The backup is of {manifest.engine}, and DATABASE_URL names {engine()}. "
            "Set DATABASE_URL to a database of the backup's kind (unset it for SQLite)."
        )
    _check_keys(manifest)
    check_databases(folder, manifest)
    return manifest


def restore(folder: Path, manifest: Manifest, *, overwrite: bool = False) -> Path | None:
    """Restore a checked backup; return the folder of the replaced files, if there were any.

    Args:
        folder: a backup.
        manifest: what ``check`` returned for it.
        overwrite: whether existing databases and keys may be replaced.

    Raises:
        BackupError: the backup cannot be restored here, the site runs, or something would be
            replaced without ``overwrite``. Nothing was changed then.
    """
    connections.close_all()
    owner = Path(settings.DATA_DIR).stat().st_uid
    if owner != os.getuid():
        raise BackupError(
            f"{settings.DATA_DIR} belongs to user {owner}, and this is user {os.getuid()}. "
            "Run the command as the user whom the folder belongs to."
        )
    try:
        with _site_stopped():
            _refuse_users()
            is_filled = _is_filled()
            if is_filled and not overwrite:
                raise BackupError(
                    "The database is not empty. Restore into a new SLIPWAY_DATA_DIR (and "
                    "DATABASE_URL), or pass --overwrite to replace what is there."
                )
            return _replace_site(folder, manifest, keeps_old=is_filled)
    except OSError as error:
        raise BackupError(f"The backup could not be put in place: {error}.") from error


def _check_keys(manifest: Manifest) -> None:
    """Raise an error if the environment's keys differ from those of the backup."""
    for name, variable in KEYS.items():
        given, expected = os.environ.get(variable, ""), manifest.environment_keys.get(variable)
        if expected is not None and not expected.matches(given):
            state = "has another value" if given else "is not set"
            raise BackupError(
                f"{variable} {state}: the backup was made with a key in that variable, which is "
                "not in the backup. Set it to that key."
            )
        if expected is None and given and f"{FILES}/{name}" in manifest.files:
            raise BackupError(
                f"{variable} is set, and the backup holds the key in the file {name}. Unset the "
                "variable, or sessions and secrets of the backup cannot be decrypted."
            )


@contextmanager
def _site_stopped() -> Iterator[None]:
    """Hold the lock of ``up`` within the context.

    Raises:
        BackupError: a site runs in this data folder.
    """
    path = Path(settings.DATA_DIR) / LOCK
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BackupError(
                f"A site runs in {settings.DATA_DIR}. Stop it first (Ctrl-C where "
                "`manage.py up` runs), or restore into another SLIPWAY_DATA_DIR."
            ) from None
        yield


def _refuse_users() -> None:
    """Raise an error if any process uses the database."""
    if engine() == "postgresql":
        if sessions := database_copies.other_sessions():
            raise BackupError(
                f"The database is in use: {'; '.join(sessions[:5])}. End these connections first."
            )
        return
    for alias in settings.DATABASES:
        if database_copies.is_in_use(database_file(alias)):
            raise BackupError(
                f"{database_file(alias)} is in use by another process. Stop the site first."
            )


def _is_filled() -> bool:
    if engine() == "postgresql":
        return database_copies.postgres_has_tables()
    return any(database_copies.has_tables(database_file(alias)) for alias in settings.DATABASES)


def _replace_site(folder: Path, manifest: Manifest, *, keeps_old: bool) -> Path | None:
    """Copy files next to their targets, then move them into place, the databases last."""
    data = Path(settings.DATA_DIR)
    targets = {folder / name: data / Path(name).relative_to(FILES)
               for name in manifest.files if name.startswith(f"{FILES}/")}  # fmt: skip
    databases = {}
    if manifest.engine == "sqlite":
        databases = {folder / DATABASES / f"{alias}.sqlite3": database_file(alias)
                     for alias in manifest.rows}  # fmt: skip
    free = shutil.disk_usage(data).free
    if free < manifest.num_bytes + SPARE_BYTES:
        raise BackupError(
            f"The backup has {manifest.num_bytes / 1e6:,.0f} MB, and the disk of {data} has "
            f"{free / 1e6:,.0f} MB free. Free some space."
        )
    staged = {_temporary_path(target): target for target in (targets | databases).values()}
    try:
        for source, target in (targets | databases).items():
            _stage(source, _temporary_path(target))
        (data / STAMP).unlink(missing_ok=True)
        if manifest.engine == "postgresql":
            dump, rows = folder / DATABASES / "default.dump", manifest.rows["default"]
            database_copies.load(dump, rows, replaces=keeps_old)
        aside = data / f"before-restore-{time.strftime('%Y%m%d-%H%M%S')}"
        for fresh, target in staged.items():
            if keeps_old:  # else only the key file that this command created exists
                _set_aside(target, aside, data)
            fresh.replace(target)
    finally:
        for fresh in staged:
            fresh.unlink(missing_ok=True)
    return aside if aside.exists() else None


def _temporary_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.restored")


def _stage(source: Path, fresh: Path) -> None:
    """Copy a file to the disk of its target, and sync it."""
    fresh.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copyfile(source, fresh)
    fresh.chmod(0o600)
    with fresh.open("rb") as file:
        os.fsync(file.fileno())


def _set_aside(target: Path, aside: Path, data: Path) -> None:
    """Move an existing target aside; artefacts and datasets, which never change, stay."""
    is_below = target.is_relative_to(data)
    name = target.relative_to(data) if is_below else Path(target.name)
    if name.parts[0] in ("artefacts", "datasets"):
        return  # their names are unique and their contents never change
    for ending in database_copies.BESIDE:
        old = target.with_name(target.name + ending)
        if old.exists():
            moved = aside / name.with_name(old.name)
            moved.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.move(old, moved)
