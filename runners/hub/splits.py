"""Which splits of data sets were downloaded as a whole: a note of each, in the host's folder.

A snapshot in the cache may have a part of a split, and says nothing of what a split is.
"""

import hashlib
import json
from pathlib import Path

from runners.hub.repository import folder_name
from runners.hub.settings import HubSettings
from runners.hub.store import snapshot_folder
from runners.jobspec import HubData

FOLDER = "hub_splits"


def note_of(host_dir: Path, data: HubData, commit: str) -> Path:
    """Return the file that has the ``paths`` of a split which the cache has had as a whole.

    Of data with ``records`` those of as many.
    """
    parts: list[object] = [folder_name(data.repository), commit, data.subset, data.split]
    parts += [data.records] if data.records else []
    return host_dir / FOLDER / f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}.json"


def stored_split(host_dir: Path, data: HubData, commit: str, settings: HubSettings) -> list[str]:
    """Return the files of a split at a commit if all that are read are there, none otherwise."""
    folder = snapshot_folder(settings, data.repository, commit)
    whole = data.model_copy(update={"records": None})
    for note in dict.fromkeys(note_of(host_dir, each, commit) for each in (whole, data)):
        paths: list[str] = json.loads(note.read_bytes())["paths"] if note.is_file() else []
        if paths and all((folder / path).is_file() for path in paths):
            return paths
    return []
