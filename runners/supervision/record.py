"""Small files of an attempt folder that must be whole or absent, and the exit record.

The exit record has its space reserved when the attempt starts, so that it can be written
on a full disk. Standard library only.
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
    """Another process holds the lock: it is alive and in charge."""


@contextmanager
def locked(path: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Hold the lock file while the block runs; wait at most ``patience_s`` for it.

    Raises:
        LockedError: another process holds it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + patience_s
        while not _take(handle):
            if time.monotonic() >= deadline:
                raise LockedError(f"{path} is held by another process")
            time.sleep(0.01)
        yield
    finally:
        os.close(handle)


def _take(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Tell whether a live process holds the lock file."""
    try:
        with locked(path):
            return False
    except LockedError:
        return True


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document so that a reader finds the old one or the new one, never a part.

    Raises:
        OSError: the disk does not take it whole; the old one stays.
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
    """Return the document, or None when there is none or it is damaged."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def remove_secrets(folder: Path) -> None:
    """Delete the files of an attempt's secrets, whether or not there are any."""
    shutil.rmtree(folder / SECRETS, ignore_errors=True)


def reserve_exit_slot(folder: Path) -> None:
    """Take the disk space that the exit record will need."""
    with suppress(OSError):  # a disk that is full already: the plain write is tried later
        handle = os.open(folder / EXIT_SLOT, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, SLOT_BYTES)
        finally:
            os.close(handle)


def write_exit_record(folder: Path, record: Record) -> Record:
    """Write ``exit.json`` into its reserved space and return what it holds.

    The oldest of the last lines go until the record fits.
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
