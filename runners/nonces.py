"""Stores doorbell nonces until they expire, across processes and restarts."""

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path


class NonceStore:
    """A table of unique nonces: exactly one process sees a nonce as new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._open() as database:
            database.execute(
                "CREATE TABLE IF NOT EXISTS nonce (value TEXT PRIMARY KEY, until REAL NOT NULL)"
            )

    def is_new(self, nonce: str, until: float) -> bool:
        """Store a nonce until an instant; return whether it is new."""
        with self._open() as database:
            database.execute("DELETE FROM nonce WHERE until < ?", (time.time(),))
            try:
                database.execute("INSERT INTO nonce VALUES (?, ?)", (nonce, until))
            except sqlite3.IntegrityError:
                return False
        return True

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self._path, timeout=5.0)) as database, database:
            yield database
