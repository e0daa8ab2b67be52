"""Starts an attempt's job process with pipes and a marker; it dies with this process.

Standard library only.
"""

import ctypes
import os
import resource
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from runners.processes import die_with
from runners.supervision.procfs import MARKER

EVENT_FD = "SLIPWAY_EVENT_FD"
OOM_SCORE = 500  # the OOM killer chooses the job before its supervisor
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


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


def redirect_output(path: Path) -> None:
    """Redirect this process's output to a file and its input to /dev/null."""
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
