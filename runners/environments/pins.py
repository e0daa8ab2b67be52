"""The pinned packages of a named environment, read from its file.

The first line is a comment that says what it is for, on which hardware, and how large. Lines
``# probe:``, ``# size-bytes:`` and ``# tried:`` follow, then one ``name==version`` a line.
Every package is listed, with all that it needs: pip adds none by itself.
"""

import hashlib
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

SHIPPED = Path(__file__).parent
NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.+!_-]*")
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_FACTS = ("probe", "size-bytes", "tried")
DIGEST_LENGTH = 16


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

    @property
    def digest(self) -> str:
        """Return what two builds have in common: the pins and the Python they are for."""
        named = [platform.python_version(), platform.machine(), *self.packages]
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
    facts = _facts(path, comments)
    return Pins(path.stem, path, lines[0].removeprefix("# "), *facts, packages)


def _facts(path: Path, comments: list[str]) -> tuple[tuple[str, ...], int, bool]:
    found: Mapping[str, str] = {
        name: line.partition(":")[2].strip()
        for line in comments
        for name in _FACTS
        if line.startswith(f"# {name}:")
    }
    modules = tuple(found.get("probe", "").split())
    size = found.get("size-bytes", "")
    if not modules or not all(map(_MODULE.fullmatch, modules)) or not size.isdigit():
        raise PinsError(f"{path} needs '# probe: MODULE ...' and '# size-bytes: NUMBER'")
    return modules, int(size), found.get("tried", "").startswith("yes")
