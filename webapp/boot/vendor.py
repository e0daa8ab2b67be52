"""Third-party static files: fetched from npm and verified against a committed SHA-384.

The files are committed, so this code does not run in production. It fetches them, and a test
uses it to verify that they are the published bytes.
"""

import base64
import hashlib
import json
import subprocess
import tarfile
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from runners.shared.log_text import last_line
from webapp.boot.console import Problem

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "static" / "vendor" / "vendor.lock"


@dataclass(frozen=True)
class VendoredFile:
    """One file of a pinned npm package, and its required digest."""

    target: str  # path below the repository root
    package: str  # name@version
    member: str  # path inside the package
    licence: str
    sha384: str


def locked_files(lock: Path = LOCK) -> list[VendoredFile]:
    """Return the files listed in the lock."""
    return [VendoredFile(**row) for row in json.loads(lock.read_text("utf-8"))["files"]]


def sha384(data: bytes) -> str:
    """Return the digest in the format of the ``integrity`` attribute."""
    return "sha384-" + base64.b64encode(hashlib.sha384(data).digest()).decode()


def changed_files(root: Path = ROOT, lock: Path = LOCK) -> list[str]:
    """Return the vendored paths that are missing or differ from the lock."""
    return [
        file.target
        for file in locked_files(lock)
        if not (root / file.target).is_file()
        or sha384((root / file.target).read_bytes()) != file.sha384
    ]


def fetch(*, renew: bool = False) -> list[str]:
    """Write every vendored file from its npm package; return the written paths.

    With ``renew``, the lock gets the digests of the fetched files: use it after a version change,
    and review the difference before you commit it.
    """
    files, fresh, written = locked_files(), [], []
    with tempfile.TemporaryDirectory() as folder:
        archives = {name: _pack(name, Path(folder)) for name in {f.package for f in files}}
        for file in files:
            data = _member(archives[file.package], file.member)
            if sha384(data) != file.sha384 and not renew:
                raise Problem(
                    f"{file.target} from {file.package} has {sha384(data)}, "
                    f"but vendor.lock says {file.sha384}.",
                    "Check the package; `python3 manage.py vendor --renew` accepts the new bytes.",
                )
            target = ROOT / file.target
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            fresh.append(VendoredFile(**{**asdict(file), "sha384": sha384(data)}))
            written.append(file.target)
    if renew:
        rows = {"files": [asdict(file) for file in fresh]}
        LOCK.write_text(json.dumps(rows, indent=2) + "\n", "utf-8")
    return written


def _pack(package: str, folder: Path) -> Path:
    """Download one npm package into ``folder`` and return its archive."""
    command = ["npm", "pack", "--silent", package]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, check=True)
    except FileNotFoundError as error:
        raise Problem("`npm` is not installed.", "Only `vendor` needs it: install npm.") from error
    except subprocess.CalledProcessError as error:
        detail = last_line(error.stderr, "no message")
        raise Problem(f"npm cannot fetch {package}: {detail}", "Check the network.") from error
    return folder / last_line(done.stdout)


def _member(archive: Path, member: str) -> bytes:
    """Return the bytes of one file of an npm package."""
    with tarfile.open(archive) as tar:
        stream = tar.extractfile(f"package/{member}")
        if stream is None:
            raise Problem(f"{archive.name} holds no {member}.", "Correct vendor.lock.")
        return stream.read()
