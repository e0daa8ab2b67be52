"""The servers of a chain: the processes started on this host, and the listener for all of them."""

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time

import torch

from runners.jobs.events import EVENT_FD_VARIABLE
from runners.jobs.generate.link import Link, LinkClosedError
from runners.jobs.generate.stage_server import Place
from runners.jobs.runtime import BadInputError, Job, num_threads

SERVER = "runners.jobs.generate.stage_server"
LOOK_SECONDS = 0.2


class Servers:
    """This host's server processes: restarted while the job allows, stopped with it."""

    def __init__(self, job: Job, place: Place, count: int, restarts: int) -> None:
        self._job, self._place = job, place
        self._restarts, self._count = restarts, count
        self._processes = [self._start(at) for at in range(count)]

    def restart_dead(self) -> bool:
        """Restart servers that died; return whether any is alive."""
        for at, process in enumerate(self._processes):
            if process.poll() not in (None, 0) and self._restarts:
                self._restarts -= 1
                self._processes[at] = self._start(at)
        return any(process.poll() is None for process in self._processes)

    def wait(self, seconds: float) -> bool:
        """Wait for the servers to exit, then kill the rest; return whether all exited normally."""
        deadline = time.monotonic() + seconds
        codes = []
        for process in self._processes:
            try:
                codes.append(process.wait(max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait())
        return not any(codes)

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the latest starts."""
        return [process.pid for process in self._processes]

    def _start(self, at: int) -> "subprocess.Popen[str]":
        ours = {name: value for name, value in os.environ.items() if name != EVENT_FD_VARIABLE}
        env = ours | {"OMP_NUM_THREADS": str(max(1, num_threads() // self._count))}
        if torch.cuda.is_available():
            visible = env.get("CUDA_VISIBLE_DEVICES", "")
            names = (
                visible.split(",")
                if visible
                else [str(index) for index in range(torch.cuda.device_count())]
            )
            env["CUDA_VISIBLE_DEVICES"] = names[at % len(names)]
        where = [str(self._job.attempt_dir), self._place.address, str(self._place.port)]
        process = subprocess.Popen(
            [sys.executable, "-m", SERVER, *where],
            stdin=subprocess.PIPE,
            env=env,
            text=True,
        )
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(f"{self._place.key.hex()}\n")
                process.stdin.close()
        return process


class StageListener:
    """Accepts and authenticates servers; they wait here until they get layers."""

    def __init__(self, address: str, port: int, key: bytes) -> None:
        """Start listening.

        Raises:
            BadInputError: the address cannot be bound.
        """
        self._key = key
        self._waiting: queue.SimpleQueue[Link] = queue.SimpleQueue()
        try:
            self._socket = socket.create_server((address, port))
        except OSError as error:
            msg = f"the chain cannot be met at {address} port {port}: {error.strerror}"
            raise BadInputError(f"{msg}; choose another address on the host's page") from error
        self.place = Place(address, self._socket.getsockname()[1], key)
        threading.Thread(target=self._accept, name="desk", daemon=True).start()

    def next_server(self, seconds: float) -> Link | None:
        """Return a server that waits for layers; None if none connects in time."""
        with contextlib.suppress(queue.Empty):
            return self._waiting.get(timeout=max(0.0, seconds))
        return None

    def close(self) -> None:
        """Stop all waiting servers, and stop listening."""
        while link := self.next_server(0.0):
            with contextlib.suppress(LinkClosedError):
                link.send({"order": "end"})
            link.close()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # unblocks accept()
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        with contextlib.suppress(LinkClosedError):
            self._waiting.put(Link.answered(connection, self._key))
