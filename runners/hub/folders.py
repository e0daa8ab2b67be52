"""Models in folders: their files with the names that these have in the Hub's cache.

A snapshot of the cache names its blobs; ``hf download --local-dir`` leaves commit and digests
beside the files (huggingface_hub, _local_folder.py); of other files the digest is computed.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from runners.hub.listing import ETAG, HubFile, Listing, new_digest
from runners.hub.repository import COMMIT, GGUF, is_safe_path

LARGE_BYTES = 2**20  # of files that are named by their SHA-256, whatever they end in
LARGE = (".safetensors", GGUF)
HASH_BYTES = 4 * 2**20
METADATA = ".cache/huggingface/download"  # of hf download --local-dir
COMMIT_DIGITS, SHA256_DIGITS = 40, 64


def folder_listing(
    folder: Path,
    repository: str,
    commit: str = "",
    *,
    on_hashed: Callable[[int], None] = lambda _bytes: None,
) -> Listing:
    """Return the files of a folder that the Hub could have; hidden ones are left out.

    Without a commit it is that of a snapshot or of a download, else a digest of the files.
    ``on_hashed`` gets the bytes of each block that was read for a digest.
    """
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and is_safe_path(name := path.relative_to(folder).as_posix())
        and not any(part.startswith(".") for part in name.split("/"))
    )
    files = tuple(_file(folder, path, on_hashed) for path in paths)
    known = commit or commit_of(folder) or _own_commit(files)
    return Listing(repository, known, files, revision="")


def repository_of(folder: Path) -> str:
    """Return the repository whose snapshot in a cache a folder is, "" if it is none."""
    place = folder.resolve()
    name = place.parent.parent.name
    if place.parent.name != "snapshots" or not name.startswith("models--"):
        return ""
    return name.removeprefix("models--").replace("--", "/", 1)


def commit_of(folder: Path) -> str:
    """Return the commit of a snapshot, or of a download into a folder; "" if it is not known."""
    place = folder.resolve()
    if place.parent.name == "snapshots" and COMMIT.fullmatch(place.name):
        return place.name
    commits = {
        lines[0]
        for path in (folder / METADATA).rglob("*.metadata")
        if (lines := _metadata(path)) and COMMIT.fullmatch(lines[0])
    }
    return commits.pop() if len(commits) == 1 else ""


def _metadata(path: Path) -> list[str]:
    with suppress(OSError, UnicodeError):
        return path.read_text("ascii").split()
    return []


def _file(folder: Path, path: Path, on_hashed: Callable[[int], None]) -> HubFile:
    name = path.relative_to(folder).as_posix()
    size = path.stat().st_size
    etag = path.readlink().name if path.is_symlink() else ""
    if not ETAG.fullmatch(etag):
        etag = _downloaded_etag(folder, path, name) or _digest(path, name, size, on_hashed)
    return HubFile(name, size, etag, etag * (len(etag) == SHA256_DIGITS))


def _downloaded_etag(folder: Path, path: Path, name: str) -> str:
    """Return the etag that a download noted, if the file was not written since."""
    lines = _metadata(folder / METADATA / f"{name}.metadata")
    with suppress(LookupError, ValueError):
        if ETAG.fullmatch(lines[1]) and path.stat().st_mtime <= float(lines[2]) + 1:
            return lines[1]
    return ""


def _digest(path: Path, name: str, size: int, on_hashed: Callable[[int], None]) -> str:
    is_large = size >= LARGE_BYTES or name.lower().endswith(LARGE)
    digest = new_digest(HubFile(name, size, "", "-" * is_large))
    with path.open("rb") as file:
        while block := file.read(HASH_BYTES):
            digest.update(block)
            on_hashed(len(block))
    return digest.hexdigest()


def _own_commit(files: tuple[HubFile, ...]) -> str:
    """Return a commit of files that no hub named: equal files have an equal one."""
    content = "".join(f"{each.path} {each.etag}\n" for each in files)
    return hashlib.sha256(content.encode()).hexdigest()[:COMMIT_DIGITS]
