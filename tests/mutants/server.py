"""Copies of the project, and beside each a process that forks for every run of its tests.

Started as a program, this file is that process: it imports the libraries once, nothing of ours,
and runs pytest in a child for each line that it reads. The tests see the copy alone.
"""

import compileall
import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 600.0  # of one run of tests
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly")
# Imported once by each server; pytest's plugins are left to pytest, which rewrites them.
LIBRARIES = (
    "numpy", "scipy.optimize", "scipy.sparse", "pydantic", "yaml", "django.test", "redis", "celery",
    "kombu", "cryptography.fernet", "structlog", "httpx", "pyarrow", "markdown", "pytest",
)  # fmt: skip
# Variables that would lead a run to the user's data, or come from a pytest around this one.
NOT_PASSED_ON = ("SLIPWAY_", "DJANGO_", "PYTEST", "DATABASE_URL", "REDIS_URL")


@dataclass(frozen=True)
class Run:
    """One run of tests: how it ended, and the first test that failed."""

    status: int | None  # pytest's exit status; None: it did not end in time
    failed: str = ""
    tail: str = ""


def copy_project(root: Path, target: Path, packages: Sequence[str]) -> None:
    """Copy what git tracks and new files that it does not ignore, and compile the packages.

    The compiled files are known by a digest of their source: a mutant is never mistaken for it.
    """
    for path in _files_of(root):
        copied = target / path
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, copied)
    for package in packages:
        compileall.compile_dir(
            target / package, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH
        )


def _files_of(root: Path) -> list[Path]:
    if not (root / ".git").exists():
        return [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    found = (Path(name) for name in sorted(set(listed.stdout.split("\0"))) if name)
    return [path for path in found if (root / path).is_file()]


class Server:
    """A copy of the project, and the process that forks for every run of its tests."""

    def __init__(self, copy: Path, packages: Sequence[str], libraries: Sequence[str]) -> None:
        self.copy = copy
        self._scratch = copy.with_name(f"{copy.name}t")  # short: sockets lie below it
        self._scratch.mkdir()
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(NOT_PASSED_ON)
        }
        own = {"PYTHONPATH": str(copy), "TMPDIR": str(self._scratch), "PATH": programs}
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, *libraries, "--", *packages],
            cwd=copy,
            env=kept | own | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, targets: Sequence[str]) -> Run:
        """Run tests in the copy as it is now.

        Raises:
            RuntimeError: the process has ended; it has said why.
        """
        log, base = self._scratch / "log", self._scratch / "b"
        order = {
            "arguments": [*PYTEST, f"--basetemp={base}", *targets],
            "log": str(log),
            "seconds": LIMIT_SECONDS,
        }
        told = self._ask(json.dumps(order))
        if not told:
            raise RuntimeError(f"The server of {self.copy} has ended.")
        tail = log.read_text("utf-8", errors="replace").strip()[-2000:]
        return Run(**json.loads(told), tail=tail)

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        return self._process.stdout.readline()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@contextmanager
def servers(
    root: Path, packages: Sequence[str], libraries: Sequence[str], num: int
) -> Iterator[list[Server]]:
    """Give servers for as many copies, and remove them all at the end."""
    temporary = tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True)
    with temporary as folder, ExitStack() as ends:
        copies = [Path(folder) / str(number) for number in range(num)]
        copy_project(root, copies[0], packages)
        for copy in copies[1:]:
            shutil.copytree(copies[0], copy)
        started = [Server(copy, packages, libraries) for copy in copies]
        for server in started:
            ends.callback(server.close)
        yield started


# The process itself


class Recorder:
    """A plugin of pytest that notes the first test that failed."""

    def __init__(self) -> None:
        self.failed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take a failure in a test, its set-up or its end."""
        if report.failed:
            self.failed = self.failed or report.nodeid


def serve(libraries: Sequence[str], packages: Sequence[str]) -> None:
    """Import libraries, then run pytest in a child for each line that comes, until none does."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
    for package in packages:
        _refuse_foreign(package)
    for library in libraries:
        with suppress(ImportError):
            importlib.import_module(library)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_forked(json.loads(line))) + "\n")
        sys.stdout.flush()


def _refuse_foreign(package: str) -> None:
    """End the process unless a package would be imported from the copy that it runs in."""
    found = importlib.util.find_spec(package)
    places = [] if found is None else [*(found.submodule_search_locations or [found.origin])]
    if not places or Path(str(places[0])).resolve().parent != Path.cwd():
        sys.exit(f"{package} would be imported from {places}, not from {Path.cwd()}")


def _forked(order: dict[str, Any]) -> dict[str, Any]:
    """Return how a child that runs pytest ended; what it left running is killed."""
    note = Path(order["log"]).with_suffix(".failed")
    note.write_text("", "utf-8")
    pid = os.fork()
    if pid == 0:
        _in_child(order, note)
    try:
        status = _ended(pid, order["seconds"])
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    return {"status": status, "failed": "" if status is None else note.read_text("utf-8")}


def _in_child(order: dict[str, Any], note: Path) -> None:
    """Run pytest in a session of its own, and end."""
    status = 3  # what pytest says of an error of its own
    try:
        os.setsid()
        with Path(order["log"]).open("w") as log, Path(os.devnull).open() as nothing:
            for file, number in ((nothing, 0), (log, 1), (log, 2)):
                os.dup2(file.fileno(), number)
        recorder = Recorder()
        status = int(importlib.import_module("pytest").main(order["arguments"], [recorder]))
        note.write_text(recorder.failed, "utf-8")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _ended(pid: int, seconds: float) -> int | None:
    """Return a child's exit status, None if it has none in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return None


if __name__ == "__main__":
    apart = sys.argv.index("--")
    serve(sys.argv[1:apart], sys.argv[apart + 1 :])
