"""The environments on a host's disk: their pinned packages, paths, states and removal."""

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from runners.config import HostDir
from runners.messages import MAIN, EnvironmentState
from runners.supervision import record

# Reads the pinned packages of a named environment from its file.
#
# The first line is a comment with purpose, hardware and size. Lines ``# probe:``, ``#
# size-bytes:`` and ``# tried:`` follow, then one ``name==version`` per line. Every package is
# listed with its dependencies: pip adds none. With ``# beside: main`` the environment also imports
# the agent's packages, which are then not listed; ``# without:`` names declared dependencies that
# are not installed. A GPU environment has ``# cuda:``, the CUDA version of its packages, and ``#
# compute-capability:``, the minimum of a GPU.


SHIPPED = Path(__file__).parent
NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.+!_-]*")
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_VERSION = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})")
_FACTS = ("probe", "size-bytes", "tried", "beside", "without", "cuda", "compute-capability")
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")
DIGEST_LENGTH = 16


Version = tuple[int, int]


class PinsError(Exception):
    """The environment does not exist, or its file is invalid."""


class Pins(NamedTuple):
    """The content of an environment's file."""

    name: str
    path: Path
    purpose: str
    probe: tuple[str, ...]  # modules whose import is tested
    size_bytes: int  # measured after a build, otherwise the size of its packages
    is_tried: bool
    packages: tuple[str, ...]
    is_beside_main: bool = False  # it also imports the agent's packages, after its own
    without: frozenset[str] = frozenset()  # declared dependencies that are not installed
    cuda: Version | None = None  # of its packages; None: needs no GPU
    compute_capability: Version | None = None  # minimum

    @property
    def agent_package_folders(self) -> list[str]:
        """Return the agent's package folders that the environment also imports from."""
        folders = [path for path in sys.path if Path(path).name in _PACKAGE_FOLDERS]
        return folders if self.is_beside_main else []

    @property
    def digest(self) -> str:
        """Return a digest of the pins and the Python version, which identifies a build."""
        named = [
            platform.python_version(),
            platform.machine(),
            *self.packages,
            *self.agent_package_folders,
        ]
        return hashlib.sha256("\n".join(named).encode()).hexdigest()[:DIGEST_LENGTH]


def read_pins(path: Path) -> Pins:
    """Return the environment of a file.

    Raises:
        PinsError: the file is missing or has an invalid line.
    """
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise PinsError(f"{path} cannot be read: {error}") from None
    if not lines or not lines[0].startswith("# "):
        raise PinsError(f"{path} must begin with a comment that says what it is for")
    comments = [line for line in lines[1:] if line.startswith("#")]
    packages = tuple(line for line in lines if not line.startswith("#"))
    for line in packages:
        if not _PIN.fullmatch(line):
            raise PinsError(f"{path}: {line!r} is not name==version")
    if not packages:
        raise PinsError(f"{path} pins no package")
    facts = _facts(comments)
    return Pins(
        path.stem,
        path,
        lines[0].removeprefix("# "),
        *_probe_and_size(path, facts),
        is_tried=facts.get("tried", "").startswith("yes"),
        packages=packages,
        is_beside_main=facts.get("beside", "") == "main",
        without=frozenset(facts.get("without", "").split()),
        cuda=_version(path, "cuda", facts),
        compute_capability=_version(path, "compute-capability", facts),
    )


def _version(path: Path, name: str, facts: Mapping[str, str]) -> Version | None:
    if (text := facts.get(name)) is None:
        return None
    match = _VERSION.fullmatch(text)
    if match is None:
        raise PinsError(f"{path}: '# {name}: {text[:40]}' is no version like 13.0")
    return int(match[1]), int(match[2])


def _facts(comments: list[str]) -> Mapping[str, str]:
    return {
        name: line.partition(":")[2].strip()
        for line in comments
        for name in _FACTS
        if line.startswith(f"# {name}:")
    }


def _probe_and_size(path: Path, facts: Mapping[str, str]) -> tuple[tuple[str, ...], int]:
    modules = tuple(facts.get("probe", "").split())
    size = facts.get("size-bytes", "")
    if not modules or not all(map(_MODULE.fullmatch, modules)) or not size.isdigit():
        raise PinsError(f"{path} needs '# probe: MODULE ...' and '# size-bytes: NUMBER'")
    return modules, int(size)


BUILT = "environment.json"
PROGRESS = "progress.json"
LAST = "last.json"
LOOK_SECONDS = 0.3  # a check whether a lock is free holds it briefly
UNFINISHED = (".building-", ".gone-")


class EnvironmentBusyError(Exception):
    """The environment is being built, or a job runs in it."""


class Store:
    """The environments of a host.

    A file below ``environments/pins`` of the host's folder replaces the shipped one of the same
    name: the host's operator may need other package builds for its devices.
    """

    def __init__(self, host_dir: HostDir, shipped: Path = SHIPPED) -> None:
        self.path = host_dir.path / "environments"
        self.min_free_bytes = host_dir.config().min_free_bytes
        self._shipped = shipped

    # Definitions

    def names(self) -> list[str]:
        """Return the environments that can be built here."""
        paths = [*self._shipped.glob("*.txt"), *(self.path / "pins").glob("*.txt")]
        return sorted({path.stem for path in paths if NAME.fullmatch(path.stem)})

    def pins(self, name: str) -> Pins:
        """Return an environment by its name.

        Raises:
            PinsError: there is no such environment, or its file is damaged.
        """
        if not NAME.fullmatch(name) or name not in self.names():
            known = ", ".join([MAIN, *self.names()])
            raise PinsError(f"this host has the environments {known}, not {name[:40]!r}")
        own = self.path / "pins" / f"{name}.txt"
        return read_pins(own if own.exists() else self._shipped / f"{name}.txt")

    # Paths

    def home(self, name: str) -> Path:
        """Return the folder of an environment's builds, locks and state; create it if missing."""
        path = self.path / name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def folder(self, pins: Pins) -> Path:
        """Return the path of the build of these pins."""
        return self.path / pins.name / pins.digest

    def python(self, pins: Pins) -> Path:
        """Return the interpreter of the build of these pins."""
        return self.folder(pins) / "bin" / "python"

    def is_ready(self, pins: Pins) -> bool:
        """Return whether the environment is built and its base interpreter still exists."""
        return (self.folder(pins) / BUILT).exists() and self.python(pins).exists()

    # States

    def states(self) -> tuple[EnvironmentState, ...]:
        """Return every environment's present state, the agent's own first."""
        words = f"Python at {sys.prefix}"
        own = EnvironmentState(
            name=MAIN, stage="ready", purpose="Runs the agent and most jobs.", words=words[:600]
        )
        return (own, *map(self.state, self.names()))

    def state(self, name: str) -> EnvironmentState:
        """Return one environment's present state."""
        try:
            pins = self.pins(name)
        except PinsError as error:
            return EnvironmentState(name=name, stage="failed", words=str(error)[:600])
        home = self.path / name
        last = record.read_json(home / LAST) or {}
        base_state = EnvironmentState(
            name=name,
            stage="absent",
            purpose=pins.purpose[:400],
            size_bytes=pins.size_bytes,
            num_packages=len(pins.packages),
            is_tried=pins.is_tried,
            order_id=str(last.get("order_id", "")),
        )
        return base_state.model_copy(update=self._status(pins, last))

    def _status(self, pins: Pins, last: record.Record) -> dict[str, object]:
        home, built = self.path / pins.name, self.folder(pins) / BUILT
        progress = record.read_json(home / PROGRESS)
        if progress is not None and record.is_locked(home / "build.lock"):
            return {"stage": "building", **progress}
        words = str(last.get("words", ""))[:600]
        if self.is_ready(pins):
            size = (record.read_json(built) or {}).get("size_bytes", 0)
            return {"stage": "ready", "size_bytes": int(size), "words": words}
        if words:
            return {"stage": "failed", "words": words}
        return {"stage": "outdated"} if self._builds(pins.name) else {}

    def _builds(self, name: str) -> list[Path]:
        home = self.path / name
        return [path.parent for path in home.glob(f"*/{BUILT}")] if home.is_dir() else []

    # Locks and removal

    @contextlib.contextmanager
    def building(self, name: str) -> Iterator[Path]:
        """Lock an environment for building or removal; delete remains of killed builds.

        Raises:
            EnvironmentBusyError: another process holds the lock.
        """
        home = self.home(name)
        try:
            with record.locked(home / "build.lock", LOOK_SECONDS):
                (home / PROGRESS).unlink(missing_ok=True)
                for path in home.iterdir():
                    if path.name.startswith(UNFINISHED):
                        shutil.rmtree(path, ignore_errors=True)
                yield home
        except record.LockedError:
            raise EnvironmentBusyError(f"the environment {name} is being built") from None

    def hold(self, name: str) -> int:
        """Return a descriptor that prevents removal until every process holding it has ended."""
        handle = os.open(self.home(name) / "use.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(handle, fcntl.LOCK_SH)
        os.set_inheritable(handle, True)  # noqa: FBT003 - the library's own signature
        return handle

    def remove(self, name: str) -> None:
        """Delete every build of an environment.

        Raises:
            EnvironmentBusyError: it is being built, or a job runs in it.
        """
        with self.building(name) as home:
            self._delete(home, self._builds(name))
            (home / LAST).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Delete remains of killed builds, and unused builds of outdated pins."""
        for name in filter(self._needs_sweep, self.names()):
            with contextlib.suppress(EnvironmentBusyError, PinsError), self.building(name) as home:
                pins = self.pins(name)
                if self.is_ready(pins):
                    current = self.folder(pins)
                    self._delete(home, [each for each in self._builds(name) if each != current])

    def _needs_sweep(self, name: str) -> bool:
        home = self.path / name
        paths = home.iterdir() if home.is_dir() else ()
        return len(self._builds(name)) > 1 or any(
            path.name.startswith(UNFINISHED) for path in paths
        )

    @staticmethod
    def _delete(home: Path, folders: list[Path]) -> None:
        if not folders:
            return
        try:
            with record.locked(home / "use.lock"):
                renamed = [each.rename(home / f".gone-{secrets.token_hex(4)}") for each in folders]
        except record.LockedError:
            raise EnvironmentBusyError(f"a job runs in the environment {home.name}") from None
        for each in renamed:
            shutil.rmtree(each, ignore_errors=True)
