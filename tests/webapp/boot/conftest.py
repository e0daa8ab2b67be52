import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from webapp.boot import processes, suite

SLEEPER = "import time\nwhile True: time.sleep(60)"


@pytest.fixture
def group(tmp_path):
    """A group whose children are gone when the test ends, whatever it did."""
    made = processes.ProcessGroup(tmp_path, dict(os.environ))
    yield made
    made.stop(hurry=lambda: True)


def python_child(name: str, code: str = SLEEPER, **more) -> processes.Child:
    """A child that runs a few lines of Python."""
    return processes.Child(name, [sys.executable, "-c", code], **more)


def eventually(condition, timeout_s: float = 300.0):
    """Wait until the condition gives something true, and return that."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"{condition} stayed false for {timeout_s} s")


def is_alive(pid: int) -> bool:
    return processes.start_time_of(pid) is not None


def wrote(path: Path, words: str) -> bool:
    return path.exists() and words in path.read_text()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def write(tmp_path):
    """Write one file of tests."""
    (tmp_path / "tests").mkdir()

    def written(lines: str, name: str = "test_one.py") -> None:
        (tmp_path / "tests" / name).write_text(lines)

    return written


# No test of a written file needs these, which take two thirds of the time of a start.
UNNEEDED = ("anyio", "asyncio", "django", "pytest_cov", "schemathesis", "syrupy", "valkey")


def run_pytest(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run pytest as the suite does; return the exit status and everything printed."""
    without = [option for name in UNNEEDED for option in ("-p", f"no:{name}")]
    variables = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *without, *arguments],
        cwd=suite.ROOT,
        env=variables | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout
