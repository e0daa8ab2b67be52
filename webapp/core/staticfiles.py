"""Hashed file names for every asset, so that a browser may keep them for ever.

Assets may be collected while a web process reads them: a start after a crash does both at once.
So every file is replaced in one step and none is ever taken away; what a new release no longer
has stays for pages that are still open.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from django.contrib.staticfiles.storage import ManifestStaticFilesStorage
from django.core.files.base import File

READABLE_BY_ALL = 0o644


class HashedStaticFilesStorage(ManifestStaticFilesStorage):
    """Manifest storage that falls back to plain names before the first collectstatic."""

    manifest_strict = False

    def stored_name(self, name: str) -> str:
        """Return the hashed name, or the plain one where nothing was collected yet."""
        try:
            return super().stored_name(name)
        except ValueError:
            return name

    def delete(self, name: str) -> None:
        """Leave the file: it is written anew in one step, and somebody may be reading it."""

    def get_available_name(self, name: str, max_length: int | None = None) -> str:  # noqa: ARG002 -- as in Django
        """Return the name itself: what has it is replaced."""
        return name

    def _save(self, name: str, content: File[Any]) -> str:
        """Write beside the folder, then put the whole file in its place at once."""
        target, root = Path(self.path(name)), Path(self.location)
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, fresh = tempfile.mkstemp(prefix=f"{root.name}-", dir=root.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                for chunk in content.chunks():
                    file.write(chunk.encode() if isinstance(chunk, str) else chunk)
            Path(fresh).chmod(READABLE_BY_ALL)
            Path(fresh).replace(target)
        except BaseException:
            Path(fresh).unlink(missing_ok=True)
            raise
        return name
