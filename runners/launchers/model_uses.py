"""Which repositories of the Hub's cache the jobs and the copies on this host use now.

A job's files name what it uses: its claim and its spec by repository, or by the address of an
object store, until it is downloaded, then by folder; of GGUF weights there are links to the files.
A file in the host's folder names the models that are on their way from or to this host.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from runners.hub.repository import folder_name, store_repository
from runners.launchers.attempts import attempt_folders

COPIES_FILE = "copies.json"  # in the host's folder: the repositories that are copied
_STORE_URL = re.compile(r'"s3://(?:[^"\\]|\\.)*"')
LINKS = "weights"  # folder of the attempt: the files of each GGUF model, and nothing beside them


def uses_on_host(attempts_dir: Path, but: Path | None = None) -> Callable[[str], bool]:
    """Return what says whether a live attempt or a copy uses a repository, at each call.

    ``but``: the folder of an attempt that is left out.
    """

    def is_used(repository: str) -> bool:
        names = (f'"{repository}"', f"/{folder_name(repository)}/")
        return any(
            any(name in text for name in names) or repository in _of_stores(text)
            for text in (_copied(attempts_dir.parent), *_texts_of(_live(attempts_dir, but)))
        )

    return is_used


def _of_stores(text: str) -> set[str]:
    """Return the names in the cache of the addresses of object stores in a JSON text."""
    return {store_repository(json.loads(each)) for each in _STORE_URL.findall(text)}


def _live(attempts_dir: Path, but: Path | None) -> list[Path]:
    if not attempts_dir.is_dir():
        return []
    return [
        each.path
        for each in attempt_folders(attempts_dir)
        if each.path != but and not (each.is_settled or each.is_over)
    ]


def _copied(host_dir: Path) -> str:
    try:
        return (host_dir / COPIES_FILE).read_text(errors="replace")
    except OSError:
        return ""


def _texts_of(attempts: Iterable[Path]) -> Iterator[str]:
    for each in attempts:
        yield from _texts(each)


def _texts(attempt: Path) -> list[str]:
    found = []
    for path in (attempt / "spec.json", attempt / "claim.json"):
        with contextlib.suppress(OSError):
            found.append(path.read_text(errors="replace"))
    for link in (attempt / LINKS).glob("*/*"):
        with contextlib.suppress(OSError):
            found.append(str(link.readlink()))
    return found
