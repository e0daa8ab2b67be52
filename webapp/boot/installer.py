"""Installs the pinned packages with pip, each verified against a recorded SHA-256."""

import csv
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NamedTuple

from runners.shared.log_text import QUOTED_CHARACTERS, lines_of, shortened
from webapp.boot import console

# Run pip with progress output, and turn its failures into one sentence.


REPORT_EVERY_S = 5.0


class Cause(NamedTuple):
    """A pattern of pip's output, its meaning, and what to do."""

    pattern: str
    fact: str
    way_out: str


CAUSES = [  # the first match counts
    Cause(
        pattern=r"No space left on device|Errno 28|Disk quota exceeded",
        fact="The disk became full while packages were installed.",
        way_out="Free about 4 GB and start again; packages already downloaded are reused.",
    ),
    Cause(
        pattern=r"(gcc|cc|g\+\+|clang)['\"]? failed|unable to execute|Microsoft Visual C\+\+"
        r"|[Cc]ompiler .*not found|Failed to build|Failed building wheel",
        fact="A package has no ready-made build for this system, and none can be compiled here.",
        way_out="Install a C compiler and Python's headers (Debian: sudo apt install "
        "build-essential python3-dev), or use Python 3.11 to 3.13 on Linux or macOS.",
    ),
    Cause(
        pattern=r"DO NOT MATCH THE HASHES",
        fact="The hash of a package differs from the hash in its index.",
        way_out=(
            "Start again. If the error repeats, the index or a proxy in front of it is damaged, "
            "or somebody replaces packages. Nothing was unpacked."
        ),
    ),
    Cause(
        pattern=r"name resolution|Failed to establish a new connection|Network is unreachable"
        r"|getaddrinfo failed|Connection refused|ReadTimeout|ProxyError|SSLError",
        fact="The package index cannot be reached.",
        way_out="Check the network, or set PIP_INDEX_URL or PIP_FIND_LINKS to a mirror; "
        "then start again.",
    ),
    Cause(
        pattern=r"No matching distribution found|ResolutionImpossible|Could not find a version",
        fact="The package index does not offer a pinned version for this Python and system.",
        way_out="Use Python 3.11 to 3.13 on Linux (glibc) or macOS.",
    ),
]


def download(
    python: Path,
    wanted: list[str],
    constraints: Path,
    folder: Path,
    *,
    log: Path,
    only_binary: list[str],
) -> None:
    """Download ``wanted`` and its dependencies under the pins into a folder; unpack nothing."""
    command = ["download", "--prefer-binary", "--dest", str(folder), "-c", str(constraints)]
    if only_binary:
        command += ["--only-binary", ",".join(only_binary)]
    log.write_text("", "utf-8")
    _run(python, [*command, *wanted], log, _Progress())


def pip_install(python: Path, pinned: Path, *, offline: bool, log: Path) -> None:
    """Install the files in the folder of ``pinned``, each with the digest stated there."""
    command = ["install", "--no-compile", "--no-deps", "--require-hashes"]
    command += ["--find-links", str(pinned.parent), "-r", str(pinned)]
    if offline:  # not for source archives, which need the index for their build tools
        command.append("--no-index")
    _run(python, command, log, _Progress("comparing digests"))


def _run(python: Path, arguments: list[str], log: Path, progress: "_Progress") -> None:
    """Run pip, print progress every few seconds, and append its output to the log."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with (
        log.open("a", encoding="utf-8") as record,
        subprocess.Popen(
            [*command, "--progress-bar", "off"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            text=True,
            errors="replace",  # a reader that ends would leave pip waiting
        ) as process,
    ):
        reader = threading.Thread(
            target=_read, args=(process.stdout, record, progress), daemon=True
        )
        reader.start()
        try:
            while not _ended(process):
                console.line(f"      {progress}")
        except BaseException:
            process.terminate()
            raise
        reader.join()
    if process.returncode != 0:
        raise explain(log.read_text("utf-8", errors="replace"), log)


def explain(output: str, log: Path) -> console.Problem:
    """Return the problem of a failed installation."""
    for cause in CAUSES:
        if re.search(cause.pattern, output):
            return console.Problem(cause.fact, f"{cause.way_out} (pip's own words: {log})")
    errors = [line for line in lines_of(output) if line.startswith("ERROR")]
    detail = shortened(errors[0], QUOTED_CHARACTERS) if errors else "pip failed."
    return console.Problem(f"The packages could not be installed. {detail}", f"Read {log}.")


class _Progress:
    def __init__(self, doing: str = "asking the package index") -> None:
        self.started = time.monotonic()
        self.num_found = 0
        self.doing = doing

    def read(self, line: str) -> None:
        """Parse one line of pip's output."""
        if line.startswith("Collecting "):
            self.num_found += 1
        if match := re.match(
            r"\s*(?:Downloading|Using cached|Processing) (\S+)( \([\d.]+ .B\))?", line
        ):
            name = match[1].rsplit("/", 1)[-1].split("-")[0]
            self.doing = f"fetching {name}{match[2] or ''}"
        if line.startswith("Installing collected packages"):
            self.doing = f"unpacking {line.count(',') + 1} packages"

    def __str__(self) -> str:
        return f"{time.monotonic() - self.started:4.0f} s · {self.num_found} seen · {self.doing}"


def _read(lines: IO[str], record: IO[str], progress: _Progress) -> None:
    for line in lines:
        progress.read(line)
        record.write(line)


def _ended(process: subprocess.Popen[str]) -> bool:
    """Wait one reporting interval; return whether pip has ended."""
    try:
        process.wait(timeout=REPORT_EVERY_S)
    except subprocess.TimeoutExpired:
        return False
    return True


# Verify every package against a recorded SHA-256 before pip unpacks it.
#
# ``hashes.csv`` lists the files of the pinned versions and the platforms on which they were seen.
# A file with another digest, or another file for a listed release, is rejected. An unlisted file
# is trusted on first use, recorded in the environment, and verified from then on.


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
        pip_install(python, pinned, offline=all(file.is_wheel for file in files), log=log)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if verdict.unknown:
        write(state, merge_package_files(read(state), verdict.unknown, here.key))
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
    download(python, wanted, constraints, folder, log=log, only_binary=wheels)
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
        f"{len(words)} packages from the index have a SHA-256 other than the recorded one, so "
        "nothing was installed.\n  " + "\n  ".join(words) + "\n",
        "The packages may have been replaced, or a mirror builds its own. Check which index pip "
        "uses (`python3 -m pip config list`). If the difference is expected, `python3 manage.py "
        "pins --record` records the new hashes; review the change before you commit it.",
    )


def requirement(file: PackageFile) -> str:
    """Return the requirements line with version and digest of a file."""
    return f"{file.project}=={file.version} --hash=sha256:{file.sha256}\n"


def merge_package_files(
    rows: Iterable[PackageFile], fresh: Iterable[PackageFile], key: str
) -> list[PackageFile]:
    """Return the recorded package files together with newly fetched ones of platform ``key``.

    A new SHA-256 of the same file name replaces the recorded one.
    """
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
    done = subprocess.run([python, "-c", PROBE], capture_output=True, check=True)
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
