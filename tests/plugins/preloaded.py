"""Start job processes of tests from one that has imported torch, transformers and peft.

A job process spends 8 s of a core on these imports before its first line of work. In a run in
lanes one server imports them once and forks for each start: the job has its own pid, takes the
same signals and ends with the same exit codes, and its environment, folder and descriptors are
the caller's. ``start`` falls back to a cold start where no server runs, where the command is not
``python -m module``, or where a variable differs that is read at import.
"""

import array
import contextlib
import inspect
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOCKET = "SLIPWAY_TEST_PRELOADED"  # names the server's socket
ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "torch", "torch.distributed.fsdp", "transformers", "peft", "safetensors.torch", "httpx",
    "tokenizers", "uvicorn", "pydantic", "pyarrow.parquet",
    "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto",
)  # fmt: skip
COMMAND = ["tests.plugins.preloaded", *MODULES]
WITHOUT_TORCH = {"runners.jobs.drill"}  # starts in half a second by itself
READ_AT_IMPORT = (
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "TORCH",
    "PYTORCH_",
    "LD_",
    "MALLOC_",
    "PYTHONH",
    "PYTHONW",
)
MOST_DESCRIPTORS = 16
HIGH = 200  # received descriptors wait there until their numbers are free


def start(command: list[str], **options: Any) -> "subprocess.Popen[Any]":
    """Start a process as ``subprocess.Popen`` does, from the server where that is the same."""
    chosen = Preloaded if can_be_preloaded(command, options.get("env")) else subprocess.Popen
    return chosen(command, **options)


def can_be_preloaded(command: list[str], env: dict[str, str] | None) -> bool:
    """Return whether a start from the server cannot be told from a cold one."""
    path = os.environ.get(SOCKET)
    if path is None or not Path(path).exists() or command[:1] != [sys.executable]:
        return False
    found = _module_of(command)
    if found is None or found[0] in WITHOUT_TORCH:
        return False
    return _read_at_import(env or dict(os.environ)) == _read_at_import(dict(os.environ))


def _read_at_import(env: dict[str, str]) -> dict[str, str]:
    """Return the variables that a library or the interpreter reads once, as it starts."""
    read = {name: value for name, value in env.items() if name.startswith(READ_AT_IMPORT)}
    if env.get("PYTHONPATH") not in {None, str(ROOT), os.environ.get("PYTHONPATH")}:
        read["PYTHONPATH"] = env["PYTHONPATH"]
    return read


def _module_of(command: list[str]) -> tuple[str, list[str], bool] | None:
    """Return module, arguments and whether warnings are ignored; None for another command."""
    words = command[1:]
    is_quiet = words[:2] == ["-W", "ignore"]
    if is_quiet:
        words = words[2:]
    return (words[1], words[2:], is_quiet) if words[:1] == ["-m"] and len(words) > 1 else None


class Preloaded(subprocess.Popen[Any]):
    """A process that the server forked; everything else is as for any other process."""

    _connection: socket.socket

    def _execute_child(self, *positional: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*positional).arguments
        found = _module_of(list(given["args"]))
        assert found is not None
        targets = {0: given["p2cread"], 1: given["c2pwrite"], 2: given["errwrite"]}
        descriptors = {to: fd if fd != -1 else to for to, fd in targets.items()}
        descriptors |= {fd: fd for fd in given["pass_fds"]}
        request = {
            "module": found[0],
            "arguments": found[1],
            "is_quiet": found[2],
            "environment": dict(given["env"] or os.environ),
            "folder": str(given["cwd"] or Path.cwd()),
            "is_session": bool(given["start_new_session"]),
            "targets": list(descriptors),
        }
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(os.environ[SOCKET])
        _send(self._connection, request, list(descriptors.values()))
        self.pid = int(self._connection.recv(32))
        self._child_created = True
        ours = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in ours))

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            if not selector.select(0 if wait_flags & os.WNOHANG else None):
                return 0, 0
        answer = self._connection.recv(32)
        self._connection.close()
        return self.pid, int(answer) if answer else signal.SIGKILL

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid == self.pid:
                self._handle_exitstatus(status)
        return self.returncode


def _send(connection: socket.socket, request: dict[str, Any], descriptors: list[int]) -> None:
    data = json.dumps(request).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    connection.sendmsg([len(data).to_bytes(4, "big")], rights)
    connection.sendall(data)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, descriptors, _, _ = socket.recv_fds(connection, 4, MOST_DESCRIPTORS)
    size, data = int.from_bytes(head, "big"), b""
    while len(data) < size:
        data += connection.recv(size - len(data))
    return json.loads(data), descriptors


# The server's own side


@dataclass
class Job:
    """What a forked child is to become."""

    request: dict[str, Any]
    descriptors: list[int]

    def become(self) -> None:
        """Take over the caller's descriptors, environment and folder, then run the module."""
        _take_descriptors(self.descriptors, self.request["targets"])
        if self.request["is_session"]:
            os.setsid()
        os.environ.clear()
        os.environ.update(self.request["environment"])
        os.chdir(self.request["folder"])
        for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
            setattr(sys, name, open(number, mode, buffering=1, closefd=False))  # noqa: SIM115
        if self.request["is_quiet"]:
            warnings.simplefilter("ignore")
        numpy = sys.modules["numpy"]
        numpy.random.seed()
        sys.argv = ["-m", *self.request["arguments"]]
        runpy.run_module(self.request["module"], run_name="__main__", alter_sys=True)


def _take_descriptors(received: list[int], targets: list[int]) -> None:
    waiting = []
    for number, fd in enumerate(received):
        os.dup2(fd, HIGH + number)
        waiting.append(HIGH + number)
        os.close(fd)
    for fd, target in zip(waiting, targets, strict=True):
        os.dup2(fd, target)
        os.close(fd)


class Server:
    """Forks a child for each connection, and tells each connection how its child ended.

    A child that has ended stays a zombie until its caller has read how, as its own child would.
    """

    def __init__(self, path: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        waiting = path.with_suffix(".waiting")
        self.listener.bind(str(waiting))
        self.listener.listen(64)
        waiting.rename(path)  # whoever sees it is answered
        self.children: dict[int, socket.socket] = {}
        self.reported: set[int] = set()  # have ended, and their callers know
        self.woken, waker = os.pipe()
        for fd in (self.woken, waker):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker)
        self.waker = waker

    def serve(self) -> Job:
        """Fork for every request; return only in a child."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            selector.register(self.woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self.woken:
                        self._tell(selector)
                    elif key.fileobj is self.listener:
                        job = self._fork()
                        if job is not None:
                            return job
                    else:  # a caller has read how its child ended, or has gone
                        selector.unregister(key.fileobj)
                        self._reap(key.data)

    def _fork(self) -> Job | None:
        connection, _ = self.listener.accept()
        request, descriptors = _receive(connection)
        pid = os.fork()
        if pid == 0:
            self._forget(connection)
            return Job(request, descriptors)
        self.children[pid] = connection
        connection.sendall(str(pid).encode())
        for fd in descriptors:
            os.close(fd)
        return None

    def _tell(self, selector: selectors.BaseSelector) -> None:
        """Tell the callers of children that have ended how they did."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.woken, 4096)
        for pid in self.children.keys() - self.reported:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                continue
            has_exited = ended.si_code == os.CLD_EXITED
            status = ended.si_status << 8 if has_exited else ended.si_status
            self.reported.add(pid)
            with contextlib.suppress(OSError):
                self.children[pid].sendall(str(status).encode())
            selector.register(self.children[pid], selectors.EVENT_READ, pid)

    def _reap(self, pid: int) -> None:
        os.waitpid(pid, 0)
        self.reported.discard(pid)
        self.children.pop(pid).close()

    def _forget(self, connection: socket.socket) -> None:
        """Close in a child what is the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for one in (self.listener, connection, *self.children.values()):
            one.close()
        os.close(self.woken)
        os.close(self.waker)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[None]:
    """Have a server while the block runs; its socket appears once everything is imported."""
    path = folder / "preloaded"
    os.environ[SOCKET] = str(path)
    module, *imported = COMMAND
    with (folder / "preloaded.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", module, str(path), *imported],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield
    finally:
        server.kill()
        server.wait()


def main() -> None:
    """Import, serve, and in a child become the job."""
    path, *modules = sys.argv[1:]
    for name in modules:
        __import__(name)
    Server(Path(path)).serve().become()


if __name__ == "__main__":
    main()
