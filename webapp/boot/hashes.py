"""Verify every package against a recorded SHA-256 before pip unpacks it.

``hashes.csv`` lists the files of the pinned versions and the platforms on which they were seen. A
file with another digest, or another file for a listed release, is rejected. An unlisted file is
trusted on first use, recorded in the environment, and verified from then on.
"""

import csv
import hashlib
import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from webapp.boot import console, pip

LIST = Path(__file__).with_name("hashes.csv")
STATE_NAME = "slipway-hashes.csv"
HEADING = (
    "# SHA-256 of the package files that may be installed, and where each was seen.\n"
    "# Made by `python3 manage.py pins --record` on each platform, and from the reports of\n"
    "# `pip install --dry-run --ignore-installed --report FILE` by `pins --record FILE`.\n"
)
# PyTorch's index labels its builds +cpu, +cu130 and so on; each counts as a separate version.
WITH_BUILDS = frozenset({"torch"})
GLIBC_OF_OLD_TAGS = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
PROBE = (
    "import json, platform, sys; "
    "print(json.dumps([sys.implementation.name, '%d.%d' % sys.version_info[:2], sys.platform, "
    "platform.machine(), platform.libc_ver()]))"
)


@dataclass(frozen=True)
class PackageFile:
    """One package file: name, SHA-256, and the platforms on which it was seen."""

    file: str
    sha256: str
    platforms: frozenset[str] = frozenset()

    @property
    def project(self) -> str:
        """Return the normalised package name."""
        return re.sub(r"[-_.]+", "-", self._parts()[0]).lower()

    @property
    def version(self) -> str:
        """Return the version with its build label."""
        return self._parts()[1]

    @property
    def release(self) -> tuple[str, str]:
        """Return name and version; the build label counts only for ``WITH_BUILDS``."""
        version = self.version
        compared = version if self.project in WITH_BUILDS else version.partition("+")[0]
        return self.project, compared

    @property
    def is_wheel(self) -> bool:
        """Return whether it is a wheel, which is unpacked without running its code."""
        return self.file.endswith(".whl")

    def _parts(self) -> tuple[str, str]:
        if self.is_wheel:
            name, version = self.file.split("-")[:2]
        else:
            stem = re.sub(r"\.(tar\.\w+|tgz|zip)$", "", self.file)
            name, _, version = stem.rpartition("-")
        return name, version


class Platform(NamedTuple):
    """The Python and system that packages are installed for."""

    key: str
    glibc: tuple[int, ...]

    def takes(self, known: PackageFile) -> bool:
        """Return whether a listed file was seen on this platform and supports its glibc."""
        return self.key in known.platforms and glibc_of(known.file) <= self.glibc


class Verdict(NamedTuple):
    """Result of comparing files with the list."""

    right: list[PackageFile]
    unknown: list[PackageFile]
    refused: list[tuple[PackageFile, list[PackageFile]]]


def install(python: Path, wanted: list[str], constraints: Path, *, log: Path) -> None:
    """Download the packages, verify their hashes, and install exactly those files.

    Raises:
        Problem: pip failed, or a file differs from the recorded one and nothing was unpacked.
    """
    here, state = platform_of(python), log.with_name(STATE_NAME)
    listed = [*read(LIST), *read(state)]
    folder = log.with_name("slipway-wheels")
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed installation
    try:
        files = fetch(python, wanted, constraints, folder, log=log, known=listed)
        verdict = compare(files, listed, here)
        refuse(verdict)
        pinned = folder / "requirements.txt"
        pinned.write_text("".join(requirement(file) for file in files), "utf-8")
        pip.install(python, pinned, offline=all(file.is_wheel for file in files), log=log)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if verdict.unknown:
        write(state, merged(read(state), verdict.unknown, here.key))
        console.line(
            f"      {len(verdict.unknown)} of {len(files)} packages have no recorded hash for "
            f"this platform; recorded in {state} for the next time"
        )


def fetch(
    python: Path,
    wanted: list[str],
    constraints: Path,
    folder: Path,
    *,
    log: Path,
    known: Iterable[PackageFile] = (),
) -> list[PackageFile]:
    """Download the packages and their dependencies into a folder; return its files.

    pip runs a source archive's code to get its dependencies, so packages with a listed wheel for
    this platform are accepted only as wheels.
    """
    here = platform_of(python)
    wheels = sorted({file.project for file in known if file.is_wheel and here.takes(file)})
    folder.mkdir(parents=True)
    pip.download(python, wanted, constraints, folder, log=log, only_binary=wheels)
    return [PackageFile(path.name, sha256_of(path)) for path in sorted(folder.iterdir())]


def compare(found: Iterable[PackageFile], known: Sequence[PackageFile], here: Platform) -> Verdict:
    """Sort files into listed, unlisted and rejected ones."""
    verdict = Verdict([], [], [])
    for file in found:
        named = [row for row in known if row.file == file.file]
        instead = [row for row in known if row.release == file.release and here.takes(row)]
        if file.sha256 in {row.sha256 for row in named}:
            verdict.right.append(file)
        elif named or instead:
            verdict.refused.append((file, named or instead))
        else:
            verdict.unknown.append(file)
    return verdict


def refuse(verdict: Verdict) -> None:
    """Raise a problem that names the rejected files, if there are any."""
    if not verdict.refused:
        return
    words = [
        f"{got.project} {got.version}: {got.file} has SHA-256 {got.sha256}, recorded "
        + " or ".join(f"{row.file} with {row.sha256}" for row in rows)
        for got, rows in verdict.refused
    ]
    raise console.Problem(
        f"{len(words)} packages of the index are other files than the recorded ones, so nothing "
        "was installed.\n  " + "\n  ".join(words) + "\n",
        "Somebody may have swapped them, or a mirror builds its own: look where pip takes them "
        "from (`python3 -m pip config list`). If you know why they differ, `python3 manage.py "
        "pins --record` accepts what the index gives; read the difference before you keep it.",
    )


def requirement(file: PackageFile) -> str:
    """Return the requirements line with version and digest of a file."""
    return f"{file.project}=={file.version} --hash=sha256:{file.sha256}\n"


def merged(
    rows: Iterable[PackageFile], fresh: Iterable[PackageFile], key: str
) -> list[PackageFile]:
    """Return the rows with fresh ones merged; a fresh digest replaces an older one."""
    by_name = {row.file: row for row in rows}
    for file in fresh:
        older = by_name.get(file.file, file)
        by_name[file.file] = replace(file, platforms=older.platforms | {key})
    return sorted(by_name.values(), key=lambda row: (row.project, row.file))


def read(path: Path) -> list[PackageFile]:
    """Return the rows of a list; none if the file is missing."""
    if not path.exists():
        return []
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    return [
        PackageFile(row["file"], row["sha256"], frozenset(row["platforms"].split()))
        for row in csv.DictReader(lines)
    ]


def write(path: Path, rows: Iterable[PackageFile]) -> None:
    """Write the rows as a list file."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["file", "sha256", "platforms"])
    table.writerows([row.file, row.sha256, " ".join(sorted(row.platforms))] for row in rows)
    path.write_text(HEADING + text.getvalue(), "utf-8")


def platform_of(python: Path) -> Platform:
    """Return the platform that a Python reports."""
    done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=True)
    implementation, version, system, machine, (libc, libc_version) = json.loads(done.stdout)
    glibc = libc_version if libc == "glibc" else ""
    return Platform(
        key_of(implementation, version, system, machine),
        tuple(int(part) for part in re.findall(r"\d+", glibc)[:2]),
    )


def key_of(implementation: str, version: str, system: str, machine: str) -> str:
    """Return the platform's key in the list, such as ``cpython3.11-linux-x86_64``."""
    return f"{implementation}{version}-{system}-{machine}"


def glibc_of(file: str) -> tuple[int, ...]:
    """Return the oldest glibc that a wheel supports, or () if its name has none."""
    named = [(int(a), int(b)) for a, b in re.findall(r"manylinux_(\d+)_(\d+)", file)]
    old = [glibc for tag, glibc in GLIBC_OF_OLD_TAGS.items() if f"{tag}_" in file]
    return min([*named, *old], default=())


def sha256_of(path: Path) -> str:
    """Return the digest of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
