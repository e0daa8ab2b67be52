"""Ends a process with the one that started it, however that one ends.

Standard library only.
"""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends; at once when it has ended.

    The kernel counts the thread that started this process: it must be the parent's main one.
    The wish is not handed down to children.

    Args:
        parent: the pid of the process that started this one.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above took hold
        os.kill(os.getpid(), signal.SIGKILL)
