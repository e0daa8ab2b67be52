"""Atomic JSON files, locks and the exit record of an attempt folder.

Space for the exit record is reserved when the attempt starts, so that it can be written on a
full disk. Standard library only.
"""

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

EXIT_RECORD = "exit.json"
EXIT_SLOT = "exit.slot"
SLOT_BYTES = 8 * 1024
LOCK = "lock"
STOP = "stop.json"
LAUNCH = "launch.json"
SUPERVISOR = "supervisor.json"
SPOOL = "spool"
SECRETS = "secrets"

Record = dict[str, Any]


class LockedError(Exception):
    """Another live process holds the lock."""


@contextmanager
def locked(path: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Hold the lock file while the block runs; wait at most ``patience_s`` for it.

    Raises:
        LockedError: another process holds it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + patience_s
        while not _try_lock(handle):
            if time.monotonic() >= deadline:
                raise LockedError(f"{path} is held by another process")
            time.sleep(0.01)
        yield
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Return whether a live process holds the lock file."""
    try:
        with locked(path):
            return False
    except LockedError:
        return True


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document atomically: a reader sees the old or the new one, never a part.

    Raises:
        OSError: the document cannot be written; the old one stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    data = json.dumps(document).encode()
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _write_whole(handle, data)
    except OSError:
        temporary.unlink()
        raise
    finally:
        os.close(handle)
    temporary.replace(path)


def _write_whole(handle: int, data: bytes) -> None:
    if os.write(handle, data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(handle)


def read_json(path: Path) -> Record | None:
    """Return the document, or None when it is missing or damaged."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def remove_secrets(folder: Path) -> None:
    """Delete the files of an attempt's secrets, if any."""
    shutil.rmtree(folder / SECRETS, ignore_errors=True)


def reserve_exit_slot(folder: Path) -> None:
    """Reserve the disk space of the exit record."""
    with suppress(OSError):  # the disk is already full: a plain write is tried later
        handle = os.open(folder / EXIT_SLOT, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, SLOT_BYTES)
        finally:
            os.close(handle)


def write_exit_record(folder: Path, record: Record) -> Record:
    """Write ``exit.json`` into its reserved space and return its content.

    The oldest of the last lines are dropped until the record fits.
    """
    record = dict(record)
    while len(data := json.dumps(record).encode()) > SLOT_BYTES and record["last_lines"]:
        record["last_lines"] = record["last_lines"][1:]
    slot = folder / EXIT_SLOT
    handle = os.open(slot, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(handle, data, 0)
        os.ftruncate(handle, len(data))
        os.fsync(handle)
    finally:
        os.close(handle)
    slot.replace(folder / EXIT_RECORD)
    return record
