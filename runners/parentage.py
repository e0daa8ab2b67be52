"""Makes a process die with its parent.

Standard library only.
"""

import ctypes
import os
import signal

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
