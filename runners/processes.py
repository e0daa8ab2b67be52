"""Starts programs, and makes a process die with its parent."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

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
