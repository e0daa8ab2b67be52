"""A case of the offload benchmark in a child process with a memory limit."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypedDict

from runners.jobs.generate.offload_cases import Order
from runners.supervision.memory import memory_cap


class Answered(TypedDict):
    """The measurements of one run over the prompts; ``read_bytes`` since the process began."""

    seconds: float
    processor_seconds: float
    read_bytes: int
    answers: list[str]  # digests, by prompt
    figures: dict[str, float]


class BenchProcessError(RuntimeError):
    """The benchmark process died."""

    def __init__(self, returncode: int) -> None:
        reason = "-9: the cap is too small, or it took too long"
        super().__init__(f"a benchmark case ended with {returncode} ({reason})")


class BenchProcess:
    """A child process that answers the prompts on request."""

    def __init__(self, process: "subprocess.Popen[str]", out: IO[str], said: IO[str]) -> None:
        self._process, self._out, self._said = process, out, said

    def run(self, patience_seconds: float = threading.TIMEOUT_MAX) -> Answered:
        """Answer the prompts once, and return the measurements.

        Raises:
            BenchProcessError: the process died, or was killed after ``patience_seconds``.
        """
        guard = threading.Timer(patience_seconds, self._process.kill)
        guard.daemon = True
        guard.start()
        try:
            self.send("again")
            measurements: Answered = json.loads(self.receive())
        finally:
            guard.cancel()
        return measurements

    def send(self, line: str) -> None:
        """Send a line.

        Raises:
            BenchProcessError: the process has died.
        """
        try:
            self._out.write(f"{line}\n")
            self._out.flush()
        except BrokenPipeError:
            raise BenchProcessError(self._process.wait()) from None

    def receive(self) -> str:
        """Return the process's next output line.

        Raises:
            BenchProcessError: the process has died.
        """
        line = self._said.readline()
        if not line:
            raise BenchProcessError(self._process.wait())
        return line

    def end(self) -> None:
        """Kill the process and close its pipes."""
        self._process.kill()
        self._process.communicate()


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def capped(order: Order, cap_bytes: int) -> Iterator[BenchProcess]:
    """Start a case under a memory limit; yield it when its model is loaded.

    Raises:
        NoMemoryCapError: this host cannot enforce the limit.
        BenchProcessError: the process died.
    """
    forget(Path(order.folder))  # pages cached by others would not count towards the limit
    name = "policy" if order.policy else "map"
    module = [sys.executable, "-m", "runners.jobs.generate.offload_cases"]
    with memory_cap(f"slipway-bench-{os.getpid()}-{name}", cap_bytes) as cap:
        process = subprocess.Popen(
            module, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the pipes of a benchmark case were not opened")
        bench_process = BenchProcess(process, process.stdin, process.stdout)
        try:
            libraries = json.loads(bench_process.receive())["file_bytes"]
            cap.limit(cap_bytes - libraries)  # shared pages are charged to their first reader
            cap.take_in(process.pid)  # the process waits for its order and has loaded nothing
            bench_process.send(order.model_dump_json())
            bench_process.receive()
            yield bench_process
        finally:
            bench_process.end()
