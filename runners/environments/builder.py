"""Environments of jobs: what each needs, build, store, remove.

``python -m runners.environments.builder HOST_DIR NAME [ORDER_ID]`` builds one.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from planner.specs.units import GIB
from runners.shared.config import HostDir
from runners.shared.environment import NETWORK
from runners.shared.log_text import last_line, lines_of, plain
from runners.shared.messages import MAIN, EnvironmentOrder, EnvironmentState
from runners.shared.timing import LOCK_PROBE_SECONDS
from runners.supervision import child
from runners.supervision.child import start_text_process

# ---------------------------------------------------------------------------
# The environments on a host's disk: their pinned packages, paths, states and removal.
# ---------------------------------------------------------------------------


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
        raise PinsError(f"{path}: '# {name}: {text[:40]}' is not a version such as 13.0")
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
        last = child.read_json(home / LAST) or {}
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

    def _status(self, pins: Pins, last: child.Record) -> dict[str, object]:
        home, built = self.path / pins.name, self.folder(pins) / BUILT
        progress = child.read_json(home / PROGRESS)
        if progress is not None and child.is_locked(home / "build.lock"):
            return {"stage": "building", **progress}
        words = str(last.get("words", ""))[:600]
        if self.is_ready(pins):
            size = (child.read_json(built) or {}).get("size_bytes", 0)
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
            with child.locked(home / "build.lock", LOCK_PROBE_SECONDS):
                (home / PROGRESS).unlink(missing_ok=True)
                for path in home.iterdir():
                    if path.name.startswith(UNFINISHED):
                        shutil.rmtree(path, ignore_errors=True)
                yield home
        except child.LockedError:
            raise EnvironmentBusyError(
                f"the environment {name} is being built; try again when the build has ended"
            ) from None

    def hold(self, name: str) -> int:
        """Return a descriptor that prevents removal until every process holding it has ended."""
        handle = os.open(self.home(name) / "use.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(handle, fcntl.LOCK_SH)
        os.set_inheritable(handle, True)  # noqa: FBT003 - the library's own signature
        return handle

    def remove(self, name: str) -> None:
        """Delete every build of an environment.

        Raises:
            EnvironmentBusyError: the environment is being built, or a job runs in it.
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
            with child.locked(home / "use.lock"):
                renamed = [each.rename(home / f".gone-{secrets.token_hex(4)}") for each in folders]
        except child.LockedError:
            raise EnvironmentBusyError(
                f"a job runs in the environment {home.name}; try again when it has ended"
            ) from None
        for each in renamed:
            shutil.rmtree(each, ignore_errors=True)


# ---------------------------------------------------------------------------
# Builds named environments with exactly their pinned packages, one operator's order at a time.
# ---------------------------------------------------------------------------


FREE_DISK_FACTOR = 1.5  # times an environment's size: wheels and unpacked files coexist
WAIT_SECONDS = 0.5
LAST_LINES = 12
# Besides one per package: folder, unpacking, pip check, import.
MORE_STEPS = 4
PASSED = ("HOME", "LANG", "LC_ALL", "PATH", "TMPDIR")
PREFIXES = ("PIP_",)
_CAUSES = (
    (
        r"No space left on device|Disk quota exceeded",
        "the disk became full; free some space on the host and build it again",
    ),
    (
        r"name resolution|new connection|unreachable|getaddrinfo|refused|Timeout|Proxy|SSLError",
        "the package index cannot be reached from this host; give its agent PIP_INDEX_URL",
    ),
    (
        r"No matching distribution found|Could not find a version|not a supported wheel",
        "the package index has no ready-made build of a package for this Python and machine",
    ),
    (r"DO NOT MATCH THE HASHES", "a package has other bytes than its index announced"),
)


class BuildError(Exception):
    """The build failed; the text gives the reason and the remedy."""


class Step(NamedTuple):
    """The progress of a build."""

    words: str
    done: int
    total: int


OnStep = Callable[[Step], None]


def pip_variables() -> dict[str, str]:
    """Return this process's environment variables for pip: index, mirror, proxy, certificates."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(PREFIXES) or name in NETWORK
    }


def ensure(store: Store, pins: Pins, on_step: OnStep, order_id: str = "") -> None:
    """Build an environment unless it is built; wait for a build by another process.

    Raises:
        BuildError: the build failed.
    """
    while True:
        try:
            with store.building(pins.name) as home:
                _ensure_alone(store, pins, _recording(home, on_step), order_id)
                return
        except EnvironmentBusyError:
            if store.is_ready(pins) and not order_id:
                return
            on_step(Step("Waiting for another build of it", 0, _total(pins)))
            time.sleep(WAIT_SECONDS)


def _recording(home: Path, on_step: OnStep) -> OnStep:
    """Return a progress callback that also writes the step to disk for the agent."""

    def note(step: Step) -> None:
        child.write_json(home / PROGRESS, step._asdict())
        on_step(step)

    return note


def _ensure_alone(store: Store, pins: Pins, on_step: OnStep, order_id: str) -> None:
    home = store.home(pins.name)
    try:
        if not store.is_ready(pins):
            _build(store, pins, home / f".building-{secrets.token_hex(4)}", on_step)
    except BuildError as error:
        child.write_json(home / LAST, {"order_id": order_id, "words": str(error)})
        raise
    finally:
        (home / PROGRESS).unlink(missing_ok=True)
    child.write_json(home / LAST, {"order_id": order_id, "words": ""})


def _build(store: Store, pins: Pins, place: Path, on_step: OnStep) -> None:
    try:
        _check_disk(store, pins)
        total = _total(pins)
        on_step(Step("Making its folder", 0, total))
        venv.EnvBuilder(with_pip=False, symlinks=True).create(place)
        python = place / "bin" / "python"
        _install(pins, python, on_step)
        _link_agent_packages(pins, place)
        on_step(Step("Checking that its packages agree", total - 2, total))
        _check_packages(pins, python)
        on_step(Step("Importing it", total - 1, total))
        imports = "import " + ", ".join(pins.probe)
        for _ in _run([str(python), "-I", "-c", imports], "it does not import"):
            pass
        built = {"packages": pins.packages, "size_bytes": size_of(place)}
        child.write_json(place / BUILT, {**built, "built_at_ms": time.time_ns() // 1_000_000})
        place.rename(store.folder(pins))
    except OSError as error:
        where = error.filename or place
        raise BuildError(
            f"{where} cannot be written: {error.strerror or error}; free some space, or correct "
            "the folder's owner"
        ) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _total(pins: Pins) -> int:
    return len(pins.packages) + MORE_STEPS


def needed_bytes(pins: Pins) -> int:
    """Return the free disk space that a build needs, in bytes."""
    return int(FREE_DISK_FACTOR * pins.size_bytes)


def _check_disk(store: Store, pins: Pins) -> None:
    free = shutil.disk_usage(store.path).free
    needed = needed_bytes(pins) + store.min_free_bytes
    if free < needed:
        raise BuildError(
            f"{pins.name} needs {needed / GIB:.1f} GiB of free disk to be built and "
            f"{free / GIB:.1f} are free on this host; free some space there"
        )


def _install(pins: Pins, python: Path, on_step: OnStep) -> None:
    command = pip_command(
        python, "install", "--no-deps", "--only-binary", ":all:", "--no-input",
        "--progress-bar", "off", "-r", str(pins.path),
    )  # fmt: skip
    num_fetched, total = 0, _total(pins)
    for line in _run(command, f"{pins.name} was not built"):
        if line.startswith(("Collecting ", "Processing ")):
            num_fetched = min(num_fetched + 1, len(pins.packages))
            on_step(Step(f"Fetching {_package(line)}", num_fetched, total))
        elif line.startswith("Installing collected packages"):
            on_step(Step(f"Unpacking {len(pins.packages)} packages", total - 3, total))


def _link_agent_packages(pins: Pins, place: Path) -> None:
    """Make the agent's packages importable, after the environment's own.

    Done after the installation, so that pip does not see them and cannot replace any.
    """
    if pins.agent_package_folders:
        (packages,) = place.glob("lib/python*/site-packages")
        (packages / "beside.pth").write_text("\n".join(pins.agent_package_folders) + "\n")


def _check_packages(pins: Pins, python: Path) -> None:
    """Run ``pip check``, ignoring dependencies that are deliberately not installed.

    Raises:
        BuildError: packages are incompatible.
    """
    named = {line.partition("==")[0].lower().replace("_", "-") for line in pins.packages}
    env = _environment()
    command = pip_command(python, "check")
    result = subprocess.run(command, capture_output=True, env=env, check=False)
    lines = lines_of(result.stdout)
    own_lines = [line for line in lines if line.split(" ")[0].lower().replace("_", "-") in named]
    if conflicts := [line for line in own_lines if not _is_ignored_dependency(line, pins)]:
        raise BuildError(f"its packages have conflicting requirements: {_cause(conflicts)}")
    if result.returncode and not lines:  # problems of the agent's own packages are ignored
        raise BuildError(f"pip could not check its packages: {_cause(lines_of(result.stderr))}")


def _is_ignored_dependency(line: str, pins: Pins) -> bool:
    lacking = re.search(r"requires (\S+), which is not installed", line)
    return lacking is not None and lacking[1] in pins.without


def _package(line: str) -> str:
    name = line.split()[1].rpartition("/")[2]
    return re.split(r"==|-\d", name)[0][:60]


def pip_command(python: Path, *words: str) -> list[str]:
    """Return a pip command for another interpreter, which needs no pip installed."""
    command, *rest = words
    start = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    return [*start, command, *rest]


def _run(command: Sequence[str], what: str) -> Iterator[str]:
    """Yield a command's output lines.

    Raises:
        BuildError: the command failed; the text has its last lines.
    """
    with start_text_process(command, _environment(), stderr=subprocess.STDOUT) as process:
        last: list[str] = []
        try:
            for line in process.stdout or ():
                words = plain(line).strip()
                last = [*last, words][-LAST_LINES:]
                yield words
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise BuildError(f"{what}: {_cause(last)}")


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in PASSED if name in os.environ} | pip_variables()


def _cause(lines: Sequence[str]) -> str:
    """Return pip's failure in one sentence, with its last output line."""
    text = " ".join(lines)
    last = last_line("\n".join(lines), "no word")
    explanation = next((words for pattern, words in _CAUSES if re.search(pattern, text)), None)
    return f"{explanation} ({last})" if explanation else last


def size_of(folder: Path) -> int:
    """Return the total size of a folder's files in bytes."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files)


# Carries out an operator's orders for this host's environments, one at a time.
#
# A build is a separate process. It may outlive the agent; a killed build is restarted while the
# server repeats the order.


PROJECT = Path(__file__).resolve().parents[2]

log = logging.getLogger(__name__)


class Keeper:
    """Manages the environments of one host."""

    def __init__(self, host_dir: HostDir) -> None:
        self.store = Store(host_dir)
        self._host_dir = host_dir
        self._child: subprocess.Popen[bytes] | None = None
        self._current_states: tuple[EnvironmentState, ...] = ()
        self._reported_states: tuple[EnvironmentState, ...] = ()

    @property
    def is_building(self) -> bool:
        """Return whether a build of this agent is running."""
        return self._child is not None and self._child.poll() is None

    def news(self, *, everything: bool) -> tuple[EnvironmentState, ...] | None:
        """Return every environment's state, or None if unchanged since the last report."""
        self._current_states = self.store.states()
        return (
            self._current_states
            if everything or self._current_states != self._reported_states
            else None
        )

    def mark_reported(self) -> None:
        """Record that the server received the last states."""
        self._reported_states = self._current_states

    def obey(self, orders: Sequence[EnvironmentOrder]) -> None:
        """Carry out the orders, unless a build is running."""
        if self.is_building:
            return
        self.store.sweep()
        known = set(self.store.names())
        for order in (order for order in orders if order.name in known):
            state = self.store.state(order.name)
            if state.order_id == order.order_id or state.stage == "building":
                continue  # already done, or a job builds it
            if order.action == "remove":
                words = ""
                try:
                    self.store.remove(order.name)
                except EnvironmentBusyError as busy:
                    words = f"It was not removed: {busy}."
                self._note(order, words)
            elif not self.is_building:
                self._build(order)

    def stop(self) -> None:
        """Terminate a running build; its unfinished files are deleted."""
        if self._child is not None and self.is_building:
            self._child.terminate()
            self._child.wait()

    def _build(self, order: EnvironmentOrder) -> None:
        self._child = subprocess.Popen(
            [
                *(sys.executable, "-m", "runners.environments.builder"),
                *(str(self._host_dir.path), order.name, order.order_id),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=PROJECT,
            start_new_session=True,
        )

    def _note(self, order: EnvironmentOrder, words: str) -> None:
        log.info("environment %s: %s %s", order.name, order.action, words or "done")
        document = {"order_id": order.order_id, "words": words}
        child.write_json(self.store.home(order.name) / LAST, document)


# ---------------------------------------------------------------------------
# The program that builds one environment.
# ---------------------------------------------------------------------------


TERMINATED = 143


def main() -> int:
    """Build the environment; print an error on stderr and return exit code 1."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # deletes the unfinished build
    folder, name, *order = sys.argv[1:]
    store = Store(HostDir(Path(folder)))
    try:
        ensure(store, store.pins(name), print_step, *order[:1])
    except (BuildError, PinsError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def print_step(step: Step) -> None:
    """Print a build step."""
    sys.stdout.write(f"{step.done}/{step.total} {step.words}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
