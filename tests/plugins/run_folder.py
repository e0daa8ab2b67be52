"""Give a test run one folder for everything that it writes, and clean up after runs that died.

Loaded with ``-p`` from pyproject.toml, because pytest-django reads the settings before any
conftest. Temporary files, the product's data, databases and sockets all lie below the folder,
and ``TMPDIR`` names it, so that every process of the run carries its path. A run that is killed
removes nothing; the next one finds its record, ends its processes and removes its folder. The
user's own data, database and broker are never touched; to run the suite on PostgreSQL, set
SLIPWAY_TEST_DATABASE_URL.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RUNS = Path(
    os.environ.get("SLIPWAY_TEST_RUNS") or f"{tempfile.gettempdir()}/slipway-{os.getuid()}"
)
RECORD = "run.json"
LEFT = pytest.StashKey[list[str]]()  # command lines of processes that tests did not end
NAMESPACE = re.compile(r"^slw(\d+)-")
ENDING_SECONDS = 10.0


def start_ticks(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot; None if it does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]


def make_folder() -> Path:
    """Return a new folder whose record names this process as its owner."""
    RUNS.mkdir(mode=0o755, exist_ok=True)
    folder = RUNS / secrets.token_hex(3)
    folder.mkdir(mode=0o755)  # services of other users (munge, PostgreSQL) have folders inside
    record = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
    (folder / RECORD).write_text(json.dumps(record))
    return folder


def clean_up_dead_runs() -> list[Path]:
    """Remove what runs left whose own process no longer exists, and return their folders."""
    if not RUNS.is_dir():
        return []
    dead = [folder for folder in RUNS.iterdir() if folder.is_dir() and not _has_owner(folder)]
    for folder in dead:
        clean_up(folder)
    return dead


def _has_owner(folder: Path) -> bool:
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):  # made or removed at this moment, unless it is old
        with contextlib.suppress(OSError):
            return time.time() - folder.stat().st_mtime < 60.0
        return True
    return start_ticks(record["pid"]) == record["start_ticks"]


def clean_up(folder: Path) -> None:
    """End a run's processes, unmount what lies in its folder, and remove it."""
    end_processes(folder)
    _delete_namespaces()
    for place in _mounts_below(folder):
        subprocess.run(["umount", "-l", place], check=False, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


def end_processes(folder: Path) -> list[str]:
    """Kill every process that carries the folder's path, and return their command lines."""
    ended: dict[int, str] = {}
    deadline = time.monotonic() + ENDING_SECONDS
    while time.monotonic() < deadline:
        found = dict(processes_of(folder))
        if not found:
            break
        ended |= found
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return list(ended.values())


def processes_of(folder: Path) -> Iterator[tuple[int, str]]:
    """Yield number and command line of a run's processes; not this one and its parents."""
    text = str(folder).encode()
    own = _own_line()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in own:
            continue
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            if not command:  # a zombie, or a thread of the kernel
                continue
            if text in command or text in (entry / "environ").read_bytes():
                yield int(entry.name), command.replace(b"\0", b" ").decode(errors="replace")


def _own_line() -> set[int]:
    """Return this process and the ones above it."""
    line: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in line:
        line.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return line


def _delete_namespaces() -> None:
    """Delete the network namespaces of test processes that no longer exist."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/run/netns"):  # noqa: PTH208 -- names only
            owner = NAMESPACE.match(name)
            if owner and start_ticks(int(owner[1])) is None:
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _mounts_below(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/mounts").read_text().splitlines()
        places = [line.split()[1] for line in lines]
        return [place for place in places if place.startswith(f"{folder}/")]
    return []


def _prepare_environment(folder: Path) -> None:
    for name in ("REDIS_URL", "DATABASE_URL", "SLIPWAY_SECRET_KEY", "SLIPWAY_DEBUG"):
        os.environ.pop(name, None)
    if url := os.environ.get("SLIPWAY_TEST_DATABASE_URL"):
        os.environ["DATABASE_URL"] = url
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    os.environ["SLIPWAY_DATA_DIR"] = str(folder / "data")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    (folder / "data").mkdir(mode=0o700)


clean_up_dead_runs()
FOLDER = make_folder()
_prepare_environment(FOLDER)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Put pytest's temporary folders below the run's; clean up after SIGTERM as after Ctrl-C."""
    signal.signal(signal.SIGTERM, _interrupt)
    os.register_at_fork(after_in_child=_forget_handler)
    if config.option.basetemp is None:
        config.option.basetemp = FOLDER / "t"
        if factory := getattr(config, "_tmp_path_factory", None):
            factory._given_basetemp = FOLDER / "t"


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _forget_handler() -> None:
    """Let SIGTERM end what a test forks as it ends any other process."""
    if signal.getsignal(signal.SIGTERM) is _interrupt:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End what the tests left running once their fixtures are gone."""
    session.config.stash[LEFT] = end_processes(FOLDER)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Name each process that had to be ended."""
    for command in config.stash.get(LEFT, []):
        terminalreporter.write_line(f"Left running by the tests, ended now: {command}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Remove the run's folder."""
    clean_up(FOLDER)
