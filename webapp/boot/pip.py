"""Run pip with progress output, and turn its failures into one sentence."""

import os
import re
import subprocess
import threading
import time
from pathlib import Path
from typing import IO, NamedTuple

from webapp.boot import console

REPORT_EVERY_S = 5.0


class Cause(NamedTuple):
    """A pattern of pip's output, its meaning, and what to do."""

    pattern: str
    fact: str
    way_out: str


CAUSES = [  # the first match counts
    Cause(
        pattern=r"No space left on device|Errno 28",
        fact="The disk became full while packages were installed.",
        way_out="Free about 4 GB and start again; what has arrived is reused.",
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
        fact="A package has other bytes than its index announced.",
        way_out="Start again; if it stays so, the index or a proxy before it is damaged, or "
        "somebody swaps packages: nothing of it was unpacked.",
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


def install(python: Path, pinned: Path, *, offline: bool, log: Path) -> None:
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
        raise explain(log.read_text("utf-8"), log)


def explain(output: str, log: Path) -> console.Problem:
    """Return the problem of a failed installation."""
    for cause in CAUSES:
        if re.search(cause.pattern, output):
            return console.Problem(cause.fact, f"{cause.way_out} (pip's own words: {log})")
    errors = [line for line in output.splitlines() if line.startswith("ERROR")]
    detail = errors[0] if errors else "pip failed."
    return console.Problem(f"The packages could not be installed. {detail}", f"Read {log}.")


class _Progress:
    """Progress of pip, parsed from its output."""

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
