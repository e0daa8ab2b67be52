"""A way of the bench as a process of its own under the cap, asked for one answer after another."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypedDict

from runners.jobs.generate.offload_ways import Order
from runners.supervision.memory_cap import memory_cap


class Answered(TypedDict):
    """What answering the pile once measured; ``read_bytes`` since the process began."""

    seconds: float
    processor_seconds: float
    read_bytes: int
    answers: list[str]  # digests, by prompt
    figures: dict[str, float]


class WayEndedError(RuntimeError):
    """The process of a way died."""

    def __init__(self, returncode: int) -> None:
        reason = "-9: the cap is too small, or it took too long"
        super().__init__(f"a way of the bench ended with {returncode} ({reason})")


class Way:
    """A process that answers the pile when it is asked to."""

    def __init__(self, process: "subprocess.Popen[str]", out: IO[str], said: IO[str]) -> None:
        self._process, self._out, self._said = process, out, said

    def run(self, patience_seconds: float = threading.TIMEOUT_MAX) -> Answered:
        """Return what answering the pile once measured.

        Raises:
            WayEndedError: the process died, or was killed because it took longer.
        """
        guard = threading.Timer(patience_seconds, self._process.kill)
        guard.daemon = True
        guard.start()
        try:
            self.tell("again")
            found: Answered = json.loads(self.hear())
        finally:
            guard.cancel()
        return found

    def tell(self, line: str) -> None:
        """Send a line.

        Raises:
            WayEndedError: nobody reads it: the process died.
        """
        try:
            self._out.write(f"{line}\n")
            self._out.flush()
        except BrokenPipeError:
            raise WayEndedError(self._process.wait()) from None

    def hear(self) -> str:
        """Return its next line.

        Raises:
            WayEndedError: there is none: the process died.
        """
        line = self._said.readline()
        if not line:
            raise WayEndedError(self._process.wait())
        return line

    def end(self) -> None:
        """Kill it, and let go of its pipes."""
        self._process.kill()
        self._process.communicate()


def forget(folder: Path) -> None:
    """Let the system keep nothing of a folder's files in memory."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def capped(order: Order, cap_bytes: int) -> Iterator[Way]:
    """Yield a way whose model stands; no page of its files was in memory before.

    Raises:
        NoMemoryCapError: nothing here could hold the cap.
        WayEndedError: the process died.
    """
    forget(Path(order.folder))  # else pages that others paid for would be free for this one
    name = "policy" if order.policy else "map"
    module = [sys.executable, "-m", "runners.jobs.generate.offload_ways"]
    with memory_cap(f"slipway-bench-{os.getpid()}-{name}", cap_bytes) as cap:
        process = subprocess.Popen(
            module, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the pipes of a way were not opened")
        way = Way(process, process.stdin, process.stdout)
        try:
            libraries = json.loads(way.hear())["file_bytes"]
            cap.limit(cap_bytes - libraries)  # the kernel counts shared pages where they were read
            cap.take_in(process.pid)  # it waits for its order: nothing is loaded yet
            way.tell(order.model_dump_json())
            way.hear()
            yield way
        finally:
            way.end()
