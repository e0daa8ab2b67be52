"""Build a named environment: a virtual environment of its own with exactly its pinned packages.

It is made in a folder beside its place and renamed there once ``pip check`` and an import of
its modules passed. Packages come as wheels, so that nothing of them runs while it is built;
from where is for pip's own settings to say (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf).
"""

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

from runners.environments.pins import Pins
from runners.environments.store import BUILT, LAST, PROGRESS, EnvironmentBusyError, Store
from runners.programs import heard
from runners.supervision import record

GIB = 2**30
ROOM = 1.5  # of an environment's size: wheels lie beside what is unpacked of them
WAIT_SECONDS = 0.5
LAST_LINES = 12
# Besides its packages: the folder, unpacking, the check of what they need, the import.
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
    """It could not be built; the text says why and what to do."""


class Step(NamedTuple):
    """How far a build is."""

    words: str
    done: int
    total: int


Tell = Callable[[Step], None]


def pip_variables() -> dict[str, str]:
    """Return what pip is told of in this process's environment: index, mirror, proxy."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(PREFIXES) or name.lower() in PROXIES
    }


def ensure(store: Store, pins: Pins, tell: Tell, order_id: str = "") -> None:
    """Build an environment unless it is built; wait where somebody else builds it.

    Raises:
        BuildError: it cannot be built.
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
    """Return a teller that also notes the step on disk, where the agent reads it."""

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
        _see(pins, place)
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
    """Return how much disk must be free to build it."""
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
    seen, total = 0, _total(pins)
    for line in _run(command, f"{pins.name} was not built"):
        if line.startswith(("Collecting ", "Processing ")):
            seen = min(seen + 1, len(pins.packages))
            tell(Step(f"Fetching {_package(line)}", seen, total))
        elif line.startswith("Installing collected packages"):
            tell(Step(f"Unpacking {len(pins.packages)} packages", total - 3, total))


def _see(pins: Pins, place: Path) -> None:
    """Let it import the agent's packages too, behind its own.

    After they were installed: pip sees none of the agent's, and so cannot think of replacing one.
    """
    if pins.seen:
        (packages,) = place.glob("lib/python*/site-packages")
        (packages / "beside.pth").write_text("\n".join(pins.seen) + "\n")


def _check_packages(pins: Pins, python: Path) -> None:
    """Ask pip whether its packages agree, but for those it does without.

    Raises:
        BuildError: they do not.
    """
    named = {line.partition("==")[0].lower().replace("_", "-") for line in pins.packages}
    env = _environment()
    command = pip_command(python, "check")
    said = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    lines = said.stdout.splitlines()
    ours = [line for line in lines if line.split(" ")[0].lower().replace("_", "-") in named]
    if wrong := [line for line in ours if not _is_done_without(line, pins)]:
        raise BuildError(f"its packages do not agree: {_cause(wrong)}")
    if said.returncode and not lines:  # what the agent's packages lack is not this build's affair
        raise BuildError(f"pip could not check its packages: {_cause([said.stderr.strip()])}")


def _is_done_without(line: str, pins: Pins) -> bool:
    lacking = re.search(r"requires (\S+), which is not installed", line)
    return lacking is not None and lacking[1] in pins.without


def _package(line: str) -> str:
    name = line.split()[1].rpartition("/")[2]
    return re.split(r"==|-\d", name)[0][:60]


def pip_command(python: Path, *words: str) -> list[str]:
    """Return pip's command for another interpreter: an environment needs no pip of its own."""
    command, *rest = words
    start = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    return [*start, command, *rest]


def _run_to_end(command: Sequence[str], what: str) -> None:
    for _ in _run(command, what):
        pass


def _run(command: Sequence[str], what: str) -> Iterator[str]:
    """Yield what a command writes, line by line.

    Raises:
        BuildError: it failed; its last lines say why.
    """
    with heard(command, _environment(), stderr=subprocess.STDOUT) as process:
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
    """Return pip's failure in one sentence, with what it said itself."""
    text = " ".join(lines)
    said = next((line for line in reversed(lines) if line), "no word")[:300]
    known = next((words for pattern, words in _CAUSES if re.search(pattern, text)), None)
    return f"{known} ({said})" if known else said


def size_of(folder: Path) -> int:
    """Return the bytes of a folder's files."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files)
