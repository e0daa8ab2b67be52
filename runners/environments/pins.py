"""Reads the pinned packages of a named environment from its file.

The first line is a comment with purpose, hardware and size. Lines ``# probe:``,
``# size-bytes:`` and ``# tried:`` follow, then one ``name==version`` per line. Every package is
listed with its dependencies: pip adds none. With ``# beside: main`` the environment also
imports the agent's packages, which are then not listed; ``# without:`` names declared
dependencies that are not installed. A GPU environment has ``# cuda:``, the CUDA version of its
packages, and ``# compute-capability:``, the minimum of a GPU.
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
