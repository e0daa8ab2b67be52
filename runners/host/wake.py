"""A FIFO in the host's folder: a byte written to it triggers a heartbeat at once."""

import contextlib
import os
import select
from pathlib import Path


class WakeListener:
    """The read end, used by the agent."""

    def __init__(self, path: Path) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # Also open for writing, so that it does not report EOF when the last writer closes.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()  # select() rejects descriptors of 1,024 or more
        self._poll.register(self._fd, select.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a wake-up; return whether there was one."""
        ready = self._poll.poll(timeout_s * 1000)
        if ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._fd, 4096)
        return bool(ready)

    def close(self) -> None:
        """Close the FIFO."""
        os.close(self._fd)


def wake_agent(path: Path) -> bool:
    """Wake the agent of a host folder; return False when none runs."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # no reader or no FIFO: the next heartbeat is periodic
        return False
    try:
        os.write(fd, b"!")
    except BlockingIOError:  # full of unread wake-ups
        return True
    else:
        return True
    finally:
        os.close(fd)
