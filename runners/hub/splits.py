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
    """Return the file that has the ``paths`` of a split which the cache has had as a whole."""
    parts = (folder_name(data.repository), commit, data.subset, data.split)
    return host_dir / FOLDER / f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}.json"


def stored_split(host_dir: Path, data: HubData, commit: str, settings: HubSettings) -> list[str]:
    """Return the files of a split at a commit if all are there, none otherwise."""
    note = note_of(host_dir, data, commit)
    paths = json.loads(note.read_bytes())["paths"] if note.is_file() else []
    folder = snapshot_folder(settings, data.repository, commit)
    return paths if all((folder / path).is_file() for path in paths) else []
