"""Online copies and integrity checks of SQLite databases, and detection of open ones."""

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from webapp.backup.manifest import BackupError

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
