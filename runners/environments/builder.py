"""Builds named environments with exactly their pinned packages, one operator's order at a time."""

import logging
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from runners.config import HostDir
from runners.environments.store import BUILT, LAST, PROGRESS, EnvironmentBusyError, Pins, Store
from runners.messages import EnvironmentOrder, EnvironmentState
from runners.processes import start_text_process
from runners.supervision import record

GIB = 2**30
ROOM = 1.5  # times an environment's size: wheels and unpacked files coexist
WAIT_SECONDS = 0.5
LAST_LINES = 12
# Besides one per package: folder, unpacking, pip check, import.
MORE_STEPS = 4
PASSED = ("HOME", "LANG", "LC_ALL", "PATH", "TMPDIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
PREFIXES = ("PIP_",)
PROXIES = ("http_proxy", "https_proxy", "no_proxy")
_CAUSES = (
    (
        r"No space left on device",
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


Tell = Callable[[Step], None]


def pip_variables() -> dict[str, str]:
    """Return this process's environment variables for pip: index, mirror, proxy."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(PREFIXES) or name.lower() in PROXIES
    }


def ensure(store: Store, pins: Pins, tell: Tell, order_id: str = "") -> None:
    """Build an environment unless it is built; wait for a build by another process.

    Raises:
        BuildError: the build failed.
    """
    while True:
        try:
            with store.building(pins.name) as home:
                _ensure_alone(store, pins, _recording(home, tell), order_id)
                return
        except EnvironmentBusyError:
            if store.is_ready(pins) and not order_id:
                return
            tell(Step("Waiting for another build of it", 0, _total(pins)))
            time.sleep(WAIT_SECONDS)


def _recording(home: Path, tell: Tell) -> Tell:
    """Return a progress callback that also writes the step to disk for the agent."""

    def note(step: Step) -> None:
        record.write_json(home / PROGRESS, step._asdict())
        tell(step)

    return note


def _ensure_alone(store: Store, pins: Pins, tell: Tell, order_id: str) -> None:
    home = store.home(pins.name)
    try:
        if not store.is_ready(pins):
            _build(store, pins, home / f".building-{secrets.token_hex(4)}", tell)
    except BuildError as error:
        record.write_json(home / LAST, {"order_id": order_id, "words": str(error)})
        raise
    finally:
        (home / PROGRESS).unlink(missing_ok=True)
    record.write_json(home / LAST, {"order_id": order_id, "words": ""})


def _build(store: Store, pins: Pins, place: Path, tell: Tell) -> None:
    try:
        _check_disk(store, pins)
        total = _total(pins)
        tell(Step("Making its folder", 0, total))
        venv.EnvBuilder(with_pip=False, symlinks=True).create(place)
        python = place / "bin" / "python"
        _install(pins, python, tell)
        _link_agent_packages(pins, place)
        tell(Step("Checking that its packages agree", total - 2, total))
        _check_packages(pins, python)
        tell(Step("Importing it", total - 1, total))
        imports = "import " + ", ".join(pins.probe)
        _run_to_end([str(python), "-I", "-c", imports], "it does not import")
        built = {"packages": pins.packages, "size_bytes": size_of(place)}
        record.write_json(place / BUILT, {**built, "built_at_ms": time.time_ns() // 1_000_000})
        place.rename(store.folder(pins))
    except OSError as error:
        raise BuildError(f"{pins.name}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _total(pins: Pins) -> int:
    return len(pins.packages) + MORE_STEPS


def needed_bytes(pins: Pins) -> int:
    """Return the free disk space that a build needs, in bytes."""
    return int(ROOM * pins.size_bytes)


def _check_disk(store: Store, pins: Pins) -> None:
    free = shutil.disk_usage(store.path).free
    needed = needed_bytes(pins) + store.min_free_bytes
    if free < needed:
        raise BuildError(
            f"{pins.name} needs {needed / GIB:.1f} GiB of free disk to be built and "
            f"{free / GIB:.1f} are free on this host; free some space there"
        )


def _install(pins: Pins, python: Path, tell: Tell) -> None:
    command = pip_command(
        python, "install", "--no-deps", "--only-binary", ":all:", "--no-input",
        "--progress-bar", "off", "-r", str(pins.path),
    )  # fmt: skip
    num_fetched, total = 0, _total(pins)
    for line in _run(command, f"{pins.name} was not built"):
        if line.startswith(("Collecting ", "Processing ")):
            num_fetched = min(num_fetched + 1, len(pins.packages))
            tell(Step(f"Fetching {_package(line)}", num_fetched, total))
        elif line.startswith("Installing collected packages"):
            tell(Step(f"Unpacking {len(pins.packages)} packages", total - 3, total))


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
    result = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    lines = result.stdout.splitlines()
    own_lines = [line for line in lines if line.split(" ")[0].lower().replace("_", "-") in named]
    if conflicts := [line for line in own_lines if not _is_ignored_dependency(line, pins)]:
        raise BuildError(f"its packages do not agree: {_cause(conflicts)}")
    if result.returncode and not lines:  # problems of the agent's own packages are ignored
        raise BuildError(f"pip could not check its packages: {_cause([result.stderr.strip()])}")


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


def _run_to_end(command: Sequence[str], what: str) -> None:
    for _ in _run(command, what):
        pass


def _run(command: Sequence[str], what: str) -> Iterator[str]:
    """Yield a command's output lines.

    Raises:
        BuildError: the command failed; the text has its last lines.
    """
    with start_text_process(command, _environment(), stderr=subprocess.STDOUT) as process:
        last: list[str] = []
        try:
            for line in process.stdout or ():
                last = [*last, line.strip()][-LAST_LINES:]
                yield line.strip()
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
    last_line = next((line for line in reversed(lines) if line), "no word")[:300]
    explanation = next((words for pattern, words in _CAUSES if re.search(pattern, text)), None)
    return f"{explanation} ({last_line})" if explanation else last_line


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
                self._remove(order)
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
                *(sys.executable, "-m", "runners.environments"),
                *(str(self._host_dir.path), order.name, order.order_id),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=PROJECT,
            start_new_session=True,
        )

    def _remove(self, order: EnvironmentOrder) -> None:
        words = ""
        try:
            self.store.remove(order.name)
        except EnvironmentBusyError as busy:
            words = f"It was not removed: {busy}."
        self._note(order, words)

    def _note(self, order: EnvironmentOrder, words: str) -> None:
        log.info("environment %s: %s %s", order.name, order.action, words or "done")
        document = {"order_id": order.order_id, "words": words}
        record.write_json(self.store.home(order.name) / LAST, document)
