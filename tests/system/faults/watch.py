"""What is watched while faults happen: process trees, spools, secrets, zombies and descriptors."""

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from runners.shared.spool import segments
from runners.supervision.procfs import MARKER, PROC, all_processes, read_process

SAMPLE_SECONDS = 0.1
MOST_CONNECTIONS = 16  # of one user: a host's worker has four, the site five or six
YOUNG_SECONDS = 2.0  # a process this young may still become another by exec
SUPERVISOR = b"supervisor.py"
WORKER = b"runners.host.app"
MARK = f"{MARKER}=".encode()


class TreeWatcher(threading.Thread):
    """P1: samples how many trees of each attempt live, all the time."""

    def __init__(self) -> None:
        super().__init__(name="trees", daemon=True)
        self.doubled: list[str] = []
        self.alive: dict[str, set[int]] = {}  # attempt -> pids, as of the last sample
        self.seen: dict[str, tuple[float, float]] = {}  # attempt -> first and last instant
        self._known: dict[int, tuple[float, str | None]] = {}
        self._suspects: set[str] = set()
        self._is_stopped = threading.Event()

    def run(self) -> None:
        while not self._is_stopped.wait(SAMPLE_SECONDS):
            self.sample()

    def stop(self) -> None:
        self._is_stopped.set()
        self.join(5.0)

    def sample(self) -> None:
        """Look once; two trees of one attempt count when two looks in a row find them."""
        instant = time.monotonic()
        alive: dict[str, set[int]] = {}
        for pid in self._pids(instant):
            _, attempt = self._known[pid]
            if attempt and (process := read_process(pid)) and process.is_alive:
                alive.setdefault(attempt, set()).add(pid)
        for attempt in alive:
            first, _ = self.seen.get(attempt, (instant, instant))
            self.seen[attempt] = (first, instant)
        suspects = {attempt for attempt, pids in alive.items() if len(roots(pids)) > 1}
        self.doubled += sorted(suspects & self._suspects)
        self._suspects, self.alive = suspects, alive

    def _pids(self, instant: float) -> Iterator[int]:
        pids = {int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()}
        for gone in self._known.keys() - pids:
            del self._known[gone]
        for pid in pids:
            since, attempt = self._known.get(pid, (instant, None))
            if attempt is None and instant - since < YOUNG_SECONDS:
                self._known[pid] = (since, _marker(pid))
            yield pid


def _marker(pid: int) -> str | None:
    with suppress(OSError):
        for entry in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
            if entry.startswith(MARK):
                return entry.removeprefix(MARK).decode()
    return None


def roots(pids: set[int]) -> list[int]:
    """Return the session leaders among ``pids`` that a supervisor started: one a tree."""
    found = []
    for pid in pids:
        with suppress(OSError):
            process = read_process(pid)
            if process is None or os.getsid(pid) != pid:
                continue
            if SUPERVISOR in (PROC / str(process.parent) / "cmdline").read_bytes():
                found.append(pid)
    return found


def spools_behind(attempts_dir: Path, acked: dict[str, int]) -> dict[str, tuple[int, int]]:
    """P2: return the spools that no longer hold what the server still lacks."""
    behind = {}
    for spool in attempts_dir.glob("*/spool"):
        held = segments(spool)
        stored = acked.get(spool.parent.name)
        if held and stored is not None and int(held[0].stem) > stored + 1:
            behind[spool.parent.name] = (int(held[0].stem), stored)
    return behind


class SecretWatcher:
    """P3: finds secrets where they must not be; files are read once, as they grow."""

    def __init__(self, secrets: dict[str, str]) -> None:
        self.secrets = secrets
        self._read: dict[Path, int] = {}

    def find(self, places: list[Path], allowed: frozenset[str]) -> list[str]:
        """Return where secrets stand in what was written since the last look."""
        found = []
        for path in _files(places):
            if path.name in allowed:
                continue
            with suppress(OSError), path.open("rb") as file:
                size = path.stat().st_size
                file.seek(self._read.get(path, 0) if size >= self._read.get(path, 0) else 0)
                found += self._in(file.read(), str(path))
                self._read[path] = max(0, size - 256)  # a secret may straddle two looks
        return found

    def in_processes(self, pids: set[int]) -> list[str]:
        """Return the processes whose command line, or whose marked environment, holds one."""
        found = []
        for pid in pids:
            with suppress(OSError):
                found += self._in((PROC / str(pid) / "cmdline").read_bytes(), f"argv of {pid}")
                environment = (PROC / str(pid) / "environ").read_bytes()
                if MARK in environment:
                    found += self._in(environment, f"environment of {pid}")
        return found

    def in_text(self, text: str, where: str) -> list[str]:
        return self._in(text.encode(), where)

    def _in(self, data: bytes, where: str) -> list[str]:
        return [f"{name} in {where}" for name, one in self.secrets.items() if one.encode() in data]


def _files(places: list[Path]) -> Iterator[Path]:
    for place in places:
        if place.is_file():
            yield place
        elif place.is_dir():
            for folder, _, names in os.walk(place):  # which takes a folder that goes meanwhile
                yield from (Path(folder, name) for name in names)


def zombies_below(pids: set[int]) -> list[int]:
    """P4: return the dead children that nobody of ``pids`` collected."""
    return [
        process.pid
        for process in all_processes()
        if process.state == "Z" and process.parent in pids
    ]


def workers(settings: set[str]) -> set[int]:
    """Return the live Celery workers whose environment holds one of ``settings``."""
    wanted = {one.encode() for one in settings}
    found = set()
    for process in all_processes():
        with suppress(OSError):
            folder = PROC / str(process.pid)
            if WORKER in (folder / "cmdline").read_bytes() and process.is_alive:
                variables = (folder / "environ").read_bytes().split(b"\0")
                found |= {process.pid} if wanted & set(variables) else set()
    return found


def crowds(users: Iterable[str]) -> dict[str, int]:
    """P4: return the users of Redis with more connections than all their parts need."""
    return {user: held for user, held in Counter(users).items() if held > MOST_CONNECTIONS}


def descriptors(pid: int) -> int:
    """Return how many files a process holds open."""
    try:
        return len(list((PROC / str(pid) / "fd").iterdir()))
    except OSError:
        return 0
