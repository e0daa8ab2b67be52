"""Copies of the database, and the manifest of a backup."""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple
from urllib.parse import quote

import psycopg
from django.db import connections, transaction
from django.db.backends.postgresql.client import DatabaseClient
from psycopg import sql
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from runners.shared.log_text import QUOTED_CHARACTERS, lines_of, shortened
from webapp.core.queries import applied_migrations

# ---------------------------------------------------------------------------
# The contents of a backup in ``manifest.json``, and their verification.
# ---------------------------------------------------------------------------


FORMAT = 1
NAME = "manifest.json"
PIECE_BYTES = 1024 * 1024
Engine = Literal["sqlite", "postgresql"]


class BackupError(Exception):
    """A backup cannot be created, read or restored; the message says why and what to do."""


class StoredFile(BaseModel):
    """One file of a backup."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_bytes: NonNegativeInt
    sha256: str


class KeyCheck(BaseModel):
    """Salted digest that verifies a key of the environment without containing it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    salt: str
    digest: str

    @classmethod
    def of(cls, key: str) -> "KeyCheck":
        """Return the check of a key."""
        salt = secrets.token_hex(16)
        return cls(salt=salt, digest=_slow_digest(key, salt))

    def matches(self, key: str) -> bool:
        """Return whether ``key`` is the key."""
        return secrets.compare_digest(self.digest, _slow_digest(key, self.salt))


class Manifest(BaseModel):
    """Contents of a backup; paths are relative to its folder, ``rows`` counts by table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    version: str
    made_at: datetime
    engine: Engine
    migrations: dict[str, list[str]]
    rows: dict[str, dict[str, NonNegativeInt]]  # by database alias
    has_artefacts: bool
    environment_keys: dict[str, KeyCheck]  # by environment variable; without the values
    files: dict[str, StoredFile]

    @property
    def schema_names(self) -> list[str]:
        """Return the last migration of every app, as ``app.0012_name``."""
        return [f"{app}.{names[-1]}" for app, names in sorted(self.migrations.items()) if names]

    @property
    def num_bytes(self) -> int:
        """Return the total size of all files."""
        return sum(file.num_bytes for file in self.files.values())


def _slow_digest(key: str, salt: str) -> str:
    """Return an expensive digest (scrypt), because the environment's key may be weak."""
    digest = hashlib.scrypt(key.encode(), salt=bytes.fromhex(salt), n=2**14, r=8, p=1)
    return digest.hex()


def digest_of(path: Path) -> StoredFile:
    """Return size and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return StoredFile(num_bytes=path.stat().st_size, sha256=digest)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a backup without verifying its files.

    Raises:
        BackupError: the folder has no backup, or the backup is damaged or has a newer format.
    """
    path = folder / NAME
    try:
        document = json.loads(path.read_text("utf-8"))
        number = document.get("format") if isinstance(document, dict) else None
        if isinstance(number, int) and number > FORMAT:
            raise BackupError(
                f"{folder} is a backup of format {number}; this version reads {FORMAT}. Restore "
                f"the backup with the version that created it ({document.get('version')})."
            )
        return Manifest.model_validate(document)
    except OSError as error:
        raise BackupError(
            f"{folder} holds no complete backup: {NAME} cannot be read ({error.strerror}). Give "
            "the folder that `python3 manage.py backup` wrote."
        ) from None
    except (ValidationError, ValueError) as error:
        where = error.errors()[0]["loc"] if isinstance(error, ValidationError) else error
        raise BackupError(f"{path} is damaged: {where}. Take another backup.") from None


def verify(folder: Path) -> Manifest:
    """Return a backup's manifest after verifying every file.

    Raises:
        BackupError: a file is missing or damaged.
    """
    manifest = read_manifest(folder)
    for name, stored in manifest.files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise BackupError(f"{NAME} names {name}, which is outside of {folder}.")
        if not path.is_file():
            raise BackupError(f"{path} is missing. Take another backup.")
        found = digest_of(path)
        if found != stored:
            raise BackupError(
                f"{path} is damaged: it has {found.num_bytes:,} bytes with SHA-256 "
                f"{found.sha256[:12]}…, written were {stored.num_bytes:,} with "
                f"{stored.sha256[:12]}…. Take another backup."
            )
    return manifest


# ---------------------------------------------------------------------------
# Copies of a PostgreSQL or SQLite database while it is in use, and their restore.
# ---------------------------------------------------------------------------


# Dump of a PostgreSQL database with ``pg_dump``, and its restore in one transaction.


LAST_LINES = 3
# Drop everything in the current schema, which would conflict with the restored objects.
DROP_ALL = """
DO $$ DECLARE each record; BEGIN
  FOR each IN SELECT tablename AS name FROM pg_tables WHERE schemaname = current_schema() LOOP
    EXECUTE format('DROP TABLE %I.%I CASCADE', current_schema(), each.name);
  END LOOP;
  FOR each IN SELECT p.oid::regprocedure AS name FROM pg_proc p
    LEFT JOIN pg_depend d ON d.objid = p.oid AND d.deptype = 'e'
    WHERE p.pronamespace = current_schema()::regnamespace AND d.objid IS NULL LOOP
    EXECUTE format('DROP FUNCTION %s CASCADE', each.name);
  END LOOP;
END $$;
"""


class DumpSummary(NamedTuple):
    """Migrations and row counts of the database at the instant of a dump."""

    migrations: dict[str, list[str]]
    rows: dict[str, int]


def dump(target: Path) -> DumpSummary:
    """Write a dump of one snapshot and return its contents; writers are not blocked.

    Raises:
        BackupError: ``pg_dump`` is missing or failed.
    """
    with transaction.atomic(), connections["default"].cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("SELECT pg_export_snapshot()")
        options = ["--format=custom", "--no-owner", "--no-privileges"]
        options += [f"--snapshot={cursor.fetchone()[0]}", f"--file={target}"]
        _run("pg_dump", options)
        return DumpSummary(applied_migrations(), count_rows(cursor))


def count_rows(cursor: Any) -> dict[str, int]:  # noqa: ANN401 (Django's cursor has no common type)
    """Return the number of rows of each table, by ``schema.table``."""
    cursor.execute(
        "SELECT schemaname, tablename FROM pg_tables WHERE schemaname = current_schema()"
    )
    counts: dict[str, int] = {}
    for schema, table in cursor.fetchall():
        cursor.execute(sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(schema, table)))
        counts[f"{schema}.{table}"] = cursor.fetchone()[0]
    return counts


def check_dump(path: Path) -> None:
    """Check that a dump can be read to its end.

    Raises:
        BackupError: ``pg_restore`` cannot read the dump.
    """
    _run("pg_restore", ["--file=/dev/null", str(path)], has_database=False)


def postgres_has_tables() -> bool:
    """Return whether the database has any table."""
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_tables WHERE schemaname = current_schema()")
        return bool(cursor.fetchone()[0])


def other_sessions() -> list[str]:
    """Return the other clients of the database, as ``user from address (program)``."""
    _close_own()
    with psycopg.connect(**connections["default"].get_connection_params()) as connection:
        cursor = connection.execute(
            "SELECT usename, coalesce(client_addr::text, 'this machine'), application_name "
            "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
            "AND backend_type = 'client backend'"
        )
        return [f"{user} from {where} ({what or 'no name'})" for user, where, what in cursor]


def _close_own() -> None:
    """Close this process's connections, including the pool."""
    connections.close_all()
    connections["default"].close_pool()  # type: ignore[attr-defined]  # PostgreSQL's wrapper


def load(path: Path, rows: Mapping[str, int], *, replaces: bool) -> None:
    """Restore a dump in one transaction: with all rows, or nothing.

    Raises:
        BackupError: a program is missing or failed, or rows are missing; nothing was changed.
    """
    options = ["--no-psqlrc", "--quiet", "-v", "ON_ERROR_STOP=1"]
    program, arguments, environment = _command("psql", options)
    _close_own()
    with tempfile.TemporaryFile("w+") as errors:
        loading = subprocess.Popen(
            [program, *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        assert loading.stdin is not None  # noqa: S101 (stdin is a pipe)
        failure = _write_script(loading.stdin, path, rows, replaces=replaces)
        status = loading.wait()
        errors.seek(0)
        words = failure or _last_lines(errors.read())
    if status or failure:
        raise BackupError(f"The dump could not be restored; the database is unchanged: {words}")


def _write_script(
    script: IO[bytes], path: Path, rows: Mapping[str, int], *, replaces: bool
) -> str:
    """Write the whole script to psql; return the error, or "" if none on this side."""
    try:
        script.write(b"BEGIN;\n" + (DROP_ALL.encode() if replaces else b""))
        script.flush()
        _run("pg_restore", ["--no-owner", "--no-privileges", "--file=-", str(path)],
             has_database=False, output=script)  # fmt: skip
        script.write(_row_checks(rows).encode() + b"COMMIT;\n")
    except BrokenPipeError:
        return ""  # psql reports the reason
    except BackupError as error:
        return str(error)
    finally:
        with contextlib.suppress(BrokenPipeError):
            script.close()  # without a COMMIT, everything is rolled back
    return ""


def _row_checks(rows: Mapping[str, int]) -> str:
    """Return statements that fail if a table has another number of rows than the dump."""
    return "".join(
        sql.SQL(
            "DO $$ BEGIN IF (SELECT count(*) FROM {table}) <> {number} THEN RAISE EXCEPTION "
            "'% does not have % rows', {name}, {number}; END IF; END $$;\n"
        )
        .format(
            table=sql.Identifier(*table.split(".", 1)),
            number=sql.Literal(number),
            name=sql.Literal(table),
        )
        .as_string()
        for table, number in rows.items()
    )


def _command(name: str, options: list[str]) -> tuple[str, list[str], dict[str, str]]:
    """Return path, arguments and environment of a PostgreSQL client program.

    The password is passed in the environment, because arguments are visible to all local users.
    """
    program = shutil.which(name)
    if program is None:
        raise BackupError(
            f"{name} is not on PATH. Install PostgreSQL's client programs of the server's version "
            "or newer (Debian: sudo apt install postgresql-client; macOS: brew install libpq)."
        )
    database = connections["default"].settings_dict
    without_pool = {k: v for k, v in database.get("OPTIONS", {}).items() if k != "pool"}
    arguments, environment = DatabaseClient.settings_to_cmd_args_env(
        {**database, "OPTIONS": without_pool}, []
    )
    return program, [*options, *arguments[1:]], os.environ | (environment or {})


def _run(
    name: str, options: list[str], *, has_database: bool = True, output: IO[bytes] | None = None
) -> None:
    program, arguments, environment = _command(name, options)
    done = subprocess.run(
        [program, *(arguments if has_database else options)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output or subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if done.returncode:
        raise BackupError(f"{name} failed: {_last_lines(done.stderr)}")


def _last_lines(output: str | bytes) -> str:
    lines = [line.strip() for line in lines_of(output) if line.strip()][-LAST_LINES:]
    return " ".join(shortened(line, QUOTED_CHARACTERS) for line in lines) or "no message"


# Online copies and integrity checks of SQLite databases, and detection of open ones.


BUSY_SECONDS = 1.0
BESIDE = ("", "-wal", "-shm", "-journal")  # suffixes of a database's files


def copy_database(source: Path, target: Path) -> None:
    """Copy a snapshot of a database; writers are not blocked.

    Raises:
        BackupError: the file cannot be read or the copy cannot be written.
    """
    try:
        with (
            closing(sqlite3.connect(f"file:{quote(str(source))}?mode=rw", uri=True)) as reading,
            closing(sqlite3.connect(target)) as writing,
        ):
            reading.backup(writing)  # in one step, and so a consistent snapshot
            writing.execute("PRAGMA journal_mode=DELETE")  # a single file without a journal
    except sqlite3.Error as error:
        raise BackupError(f"{source} could not be copied to {target}: {error}.") from error


def check_database(path: Path) -> dict[str, int]:
    """Check the integrity of a copy and return the number of rows of each table.

    Raises:
        BackupError: pages or references are damaged.
    """
    try:
        with closing(_read_only(path)) as rows:
            faults = [row[0] for row in rows.execute("PRAGMA integrity_check") if row[0] != "ok"]
            stray = rows.execute("PRAGMA foreign_key_check")
            faults += [f"a row of {row[0]} refers to nothing" for row in stray]
            if faults:
                raise BackupError(f"{path} is damaged: {faults[0]}.")
            return {
                name: rows.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0]  # noqa: S608
                for name in _tables(rows)
            }
    except sqlite3.Error as error:
        raise BackupError(f"{path} is damaged: {error}.") from error


def migrations_of(path: Path) -> dict[str, list[str]]:
    """Return the applied migrations of a copy, sorted, by app label."""
    by_app: dict[str, list[str]] = {}
    with closing(_read_only(path)) as rows:
        if "django_migrations" not in _tables(rows):
            return {}
        query = "SELECT app, name FROM django_migrations ORDER BY app, name"
        for app, name in rows.execute(query):
            by_app.setdefault(app, []).append(name)
    return by_app


def has_tables(path: Path) -> bool:
    """Return whether the file is a non-empty database, possibly a damaged one."""
    if not path.exists() or not path.stat().st_size:
        return False
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as rows:
            return bool(_tables(rows))
    except sqlite3.DatabaseError:
        return True


def is_in_use(path: Path) -> bool:
    """Return whether another process has the database open.

    Switching off the write-ahead log needs exclusive access; the next connection of the site
    switches it on again.
    """
    if not path.exists() or not path.stat().st_size:
        return False
    with closing(sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)) as rows:
        try:
            rows.execute("PRAGMA journal_mode=DELETE")
            rows.execute("BEGIN EXCLUSIVE")
            rows.execute("ROLLBACK")
        except sqlite3.DatabaseError as error:
            return "locked" in str(error)  # any other error means a damaged file
    return False


def _read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)


def _tables(rows: sqlite3.Connection) -> list[str]:
    query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    return [row[0] for row in rows.execute(query)]
