"""The pinned packages of a named environment, read from its file.

The first line is a comment that says what it is for, on which hardware, and how large. Lines
``# probe:``, ``# size-bytes:`` and ``# tried:`` follow, then one ``name==version`` a line.
Every package is listed, with all that it needs: pip adds none by itself. With ``# beside: main``
it also sees the packages of the agent's own environment, which are then not listed; what a
package asks for and does without is named in ``# without:``. One for GPUs has ``# cuda:``, that
its packages are built with, and ``# compute-capability:``, the least of a GPU.
"""

import hashlib
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

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
    """There is no such environment, or its file is not as it must be."""


class Pins(NamedTuple):
    """One environment as its file says it is."""

    name: str
    path: Path
    purpose: str
    probe: tuple[str, ...]  # modules that must import in it
    size_bytes: int  # as measured where it was built, else as its packages' files are
    is_tried: bool
    packages: tuple[str, ...]
    is_beside_main: bool = False  # it sees the agent's own packages too, behind its own
    without: frozenset[str] = frozenset()  # asked for by its packages, and never imported here
    cuda: Version | None = None  # that its packages are built with; None: it needs no GPU
    compute_capability: Version | None = None  # the least of a GPU

    @property
    def seen(self) -> list[str]:
        """Return the folders of the agent's packages that it also imports from."""
        found = [path for path in sys.path if Path(path).name in _PACKAGE_FOLDERS]
        return found if self.is_beside_main else []

    @property
    def digest(self) -> str:
        """Return what two builds have in common: the pins and the Python they are for."""
        named = [platform.python_version(), platform.machine(), *self.packages, *self.seen]
        return hashlib.sha256("\n".join(named).encode()).hexdigest()[:DIGEST_LENGTH]


def read_pins(path: Path) -> Pins:
    """Return the environment of a file.

    Raises:
        PinsError: the file is missing, or a line is none of those it may hold.
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
    found = _facts(comments)
    return Pins(
        path.stem,
        path,
        lines[0].removeprefix("# "),
        *_probe_and_size(path, found),
        is_tried=found.get("tried", "").startswith("yes"),
        packages=packages,
        is_beside_main=found.get("beside", "") == "main",
        without=frozenset(found.get("without", "").split()),
        cuda=_version(path, "cuda", found),
        compute_capability=_version(path, "compute-capability", found),
    )


def _version(path: Path, name: str, facts: Mapping[str, str]) -> Version | None:
    if (text := facts.get(name)) is None:
        return None
    found = _VERSION.fullmatch(text)
    if found is None:
        raise PinsError(f"{path}: '# {name}: {text[:40]}' is no version like 13.0")
    return int(found[1]), int(found[2])


def _facts(comments: list[str]) -> Mapping[str, str]:
    return {
        name: line.partition(":")[2].strip()
        for line in comments
        for name in _FACTS
        if line.startswith(f"# {name}:")
    }


def _probe_and_size(path: Path, found: Mapping[str, str]) -> tuple[tuple[str, ...], int]:
    modules = tuple(found.get("probe", "").split())
    size = found.get("size-bytes", "")
    if not modules or not all(map(_MODULE.fullmatch, modules)) or not size.isdigit():
        raise PinsError(f"{path} needs '# probe: MODULE ...' and '# size-bytes: NUMBER'")
    return modules, int(size)
