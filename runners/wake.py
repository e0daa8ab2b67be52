"""A fifo in the host's folder: whoever writes a byte makes the agent beat at once."""

import contextlib
import os
import select
from pathlib import Path


class WakeListener:
    """The agent's end."""

    def __init__(self, path: Path) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path, 0o600)
        # Open for writing too, so that it never reads as closed when the last writer leaves.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()  # select() itself refuses a descriptor of 1,024 or more
        self._poll.register(self._fd, select.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a wake-up and tell whether there was one."""
        ready = self._poll.poll(timeout_s * 1000)
        if ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._fd, 4096)
        return bool(ready)

    def close(self) -> None:
        """Stop listening."""
        os.close(self._fd)


def wake_agent(path: Path) -> bool:
    """Wake the agent of a host folder; False when none runs there."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # no reader, or no fifo: its next beat comes anyway
        return False
    try:
        os.write(fd, b"!")
    except BlockingIOError:  # full of wake-ups that are not read yet
        return True
    else:
        return True
    finally:
        os.close(fd)
