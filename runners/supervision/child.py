"""The job's process: start it, signal its group, and record what it did."""

import ctypes
import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from runners.supervision import procfs
from runners.supervision.procfs import MARKER

FIRST_PAUSE_SECONDS = 0.002  # between two scans of processes that are being killed

# ---------------------------------------------------------------------------
# Starts programs, and makes a process die with its parent.
# ---------------------------------------------------------------------------


# Makes a process die with its parent.
#
# Standard library only.


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """Set the kernel to kill this process when its parent ends, or now if it has ended.

    The signal is bound to the thread that started this process: it must be the parent's main
    thread. The setting is not inherited by children.

    Args:
        parent: the pid of the process that started this one.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call above
        os.kill(os.getpid(), signal.SIGKILL)


# Starts programs whose output is read as a text stream, and names the host's compiler.


def start_text_process(
    argv: Sequence[str],
    env: Mapping[str, str] | None,
    *,
    stdin: int = subprocess.DEVNULL,
    stderr: int = subprocess.PIPE,
    has_own_group: bool = False,
) -> subprocess.Popen[str]:
    """Start a program whose output is read as text; undecodable bytes are replaced.

    ``stdin`` and ``stderr`` are subprocess's constants; with its own process group a program can
    be killed together with its children.
    """
    return subprocess.Popen(
        argv,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        errors="replace",
        env=env,
        start_new_session=has_own_group,
    )


def compiler_name() -> str:
    """Return the C++ compiler that torch.compile calls: ``CXX``, or g++."""
    return os.environ.get("CXX") or "g++"


# ---------------------------------------------------------------------------
# Starts an attempt's job process with pipes and a marker; it dies with this process.
#
# Standard library only.
# ---------------------------------------------------------------------------


EVENT_FD = "SLIPWAY_EVENT_FD"
OOM_SCORE = 500  # the OOM killer chooses the job before its supervisor
_PR_SET_CHILD_SUBREAPER = 36


class Pipes(NamedTuple):
    """The read ends of a job's three pipes."""

    stdout: int
    stderr: int
    events: int


class Child(NamedTuple):
    """A started job process."""

    process: subprocess.Popen[bytes]
    pipes: Pipes


def become_subreaper() -> None:
    """Make this process, not init, the parent of its orphaned descendants."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def start(
    attempt_id: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    memory_limit_bytes: int | None = None,
) -> Child:
    """Start the job in its own session and return it with its pipes.

    ``memory_limit_bytes`` limits the data segment of each of its processes (RLIMIT_DATA):
    allocations beyond it fail.

    Raises:
        OSError: the program cannot be executed.
    """
    reading, writing = zip(*(os.pipe() for _ in Pipes._fields), strict=True)
    pipes = Pipes(*reading)
    supervisor = os.getpid()

    def die_with_supervisor() -> None:
        die_with(supervisor)
        if memory_limit_bytes:
            resource.setrlimit(resource.RLIMIT_DATA, (memory_limit_bytes, memory_limit_bytes))
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))

    stdout, stderr, events = writing
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            env={**env, MARKER: attempt_id, EVENT_FD: str(events)},
            pass_fds=(events,),
            start_new_session=True,
            preexec_fn=die_with_supervisor,  # noqa: PLW1509 - the supervisor has one thread
        )
    except OSError:
        for fd in reading:
            os.close(fd)
        raise
    finally:
        for fd in writing:
            os.close(fd)
    return Child(process, pipes)


def wait_any() -> tuple[int, int, int] | None:
    """Reap one ended child; return pid, wait status and peak memory in bytes, or None."""
    try:
        pid, status, usage = os.wait4(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status, usage.ru_maxrss * 1024) if pid else None


def kill_tree(reap: Callable[[], None], longest_pause_seconds: float) -> None:
    """Kill all descendants until two scans in a row are empty: one scan misses concurrent forks.

    ``reap`` waits for those that ended; the pause between two scans doubles up to its limit.
    """
    empty_scans, pause = 0, FIRST_PAUSE_SECONDS
    while empty_scans <= 1:
        tree = procfs.descendants(os.getpid())
        for process in tree:
            procfs.send_signal(process.pid, process.start_ticks, signal.SIGKILL)
        reap()
        empty_scans = 0 if tree else empty_scans + 1
        if tree:
            time.sleep(pause)
            pause = min(2 * pause, longest_pause_seconds)


def redirect_output(path: Path) -> None:
    """Redirect this process's output to a file and its input to /dev/null."""
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)


# ---------------------------------------------------------------------------
# Atomic JSON files, locks and the exit record of an attempt folder.
#
# Space for the exit record is reserved when the attempt starts, so that it can be written on a
# full disk. Standard library only.
# ---------------------------------------------------------------------------


EXIT_RECORD = "exit.json"
EXIT_SLOT = "exit.slot"
SLOT_BYTES = 16 * 1024  # a last line of 2,000 characters fits in any alphabet
LOCK = "lock"
STOP = "stop.json"
REQUEUED = "requeued.json"  # a scheduler runs the attempt again in this folder
LAUNCH = "launch.json"
SUPERVISOR = "supervisor.json"
SPOOL = "spool"
ENDPOINT = "endpoint.json"  # the last ``endpoint`` event: the spool deletes what is shipped
SECRETS = "secrets"

Record = dict[str, Any]


class LockedError(Exception):
    """Another live process holds the lock."""


@contextmanager
def locked(path: Path, timeout_seconds: float = 0.0) -> Iterator[None]:
    """Hold the lock file while the block runs; wait at most ``timeout_seconds`` for it.

    Raises:
        LockedError: another process holds it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + timeout_seconds
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
    """Return whether a live process holds the lock file, by taking it for an instant.

    Whoever takes such a lock waits ``LOCK_PROBE_SECONDS``, so that a probe does not turn it down.
    """
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


def _encoded(record: Record) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode(errors="replace")


def write_exit_record(folder: Path, record: Record) -> Record:
    """Write ``exit.json`` into its reserved space and return its content.

    The oldest of the last lines are dropped until the record fits.
    """
    record = dict(record)
    while len(data := _encoded(record)) > SLOT_BYTES and record["last_lines"]:
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
