"""A process that answers one query about a model folder: limits, query on stdin, JSON lines out.

Whoever can write to a model folder chooses what such a process reads. Its memory is therefore
limited here and its time by ``runners.host.preflight_weights``, which starts it.
"""

import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from runners.jobs.model_files import check_config, open_file, read_config


class Query(NamedTuple):
    """The folder, the roots that its files must be below, and the tokens of a KV cache (or 0)."""

    folder: Path
    roots: tuple[Path, ...]
    context_tokens: int = 0

    @contextmanager
    def opened(self, name: str) -> Iterator[Path]:
        """Yield a path of this process to one of the folder's files, opened safely.

        Raises:
            MissingModelError: the file is missing, not a regular file, or outside of the roots.
        """
        handle = open_file(self.folder / name, self.roots)
        try:
            yield Path(f"/proc/self/fd/{handle}")
        finally:
            os.close(handle)

    def config(self) -> dict[str, Any]:
        """Return the folder's config.json.

        Raises:
            BadInputError: the file is too long, too deep, implausible, or not a JSON object.
            MissingModelError: the file is missing, not a regular file, or outside of the roots.
        """
        with self.opened("config.json") as path:
            config = read_config(path)
        check_config(config, str(self.folder))
        return config


def start() -> Query:
    """Return this process's query, and limit its memory to the bytes that the query names.

    ``RLIMIT_DATA`` counts private writable memory, so a mapped file of any size is allowed.
    """
    query = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_DATA, (query["memory_bytes"], query["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    roots = tuple(Path(root).resolve() for root in query["roots"])
    return Query(Path(query["folder"]), roots, query["context_tokens"])


def answer(**fields: object) -> None:
    """Print a part of the answer."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()
