"""Which repositories of the Hub's cache the jobs and the copies on this host use now.

A job's files name what it uses: its claim and its spec by repository until it is downloaded, then
by folder; of GGUF weights there are links to the files. A file in the host's folder names the
models that are on their way from or to this host.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from runners.hub.repository import folder_name
from runners.launchers.attempts import attempt_folders

COPIES_FILE = "copies.json"  # in the host's folder: the repositories that are copied
LINKS = "weights"  # folder of the attempt: the files of each GGUF model, and nothing beside them


def uses_on_host(attempts_dir: Path, but: Path | None = None) -> Callable[[str], bool]:
    """Return what says whether a live attempt or a copy uses a repository, at each call.

    ``but``: the folder of an attempt that is left out.
    """

    def is_used(repository: str) -> bool:
        names = (f'"{repository}"', f"/{folder_name(repository)}/")
        return any(
            name in text
            for text in (_copied(attempts_dir.parent), *_texts_of(_live(attempts_dir, but)))
            for name in names
        )

    return is_used


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
