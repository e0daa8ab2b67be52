"""Preflight's check of a model's size by its files and the planner. It never fails.

A claim may be repeated every few seconds, so the sentence is kept for ten minutes, or until the
folder changes.
"""

import time
from functools import lru_cache
from pathlib import Path

from runners.folder_queries import FolderQuery
from runners.preflight_messages import MAX_SENTENCE, PreflightCheck, yes
from runners.stored_weights import has_safetensors, weights_of

KEPT_SECONDS = 600.0
NAMES = (".", "config.json", "model.safetensors.index.json", "model.safetensors")


def checks(query: FolderQuery) -> tuple[PreflightCheck, ...]:
    """Return what is known of a folder's size."""
    period = int(time.monotonic() / KEPT_SECONDS)
    try:
        return _checks(query, _stamp(query.folder), period)
    except OSError:  # the folder is gone again; the job reports it
        return ()


def _stamp(folder: Path) -> tuple[int, ...]:
    """Return the times of change of a folder and of the files that describe its weights."""
    paths = [folder / name for name in NAMES]
    return tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in paths)


@lru_cache(maxsize=32)
def _checks(query: FolderQuery, *_: object) -> tuple[PreflightCheck, ...]:
    return (_safetensors(query),) if has_safetensors(query) else ()


def _safetensors(query: FolderQuery) -> PreflightCheck:
    found = weights_of(query)
    figures = {"stored_bytes": found.stored_bytes, "counted_bytes": found.counted_bytes}
    shown = {name: float(value) for name, value in figures.items() if value}
    return yes("weights", _printed(found.sentence), **shown)


def _printed(sentence: str) -> str:
    """Return a sentence that a message may hold: file names and errors may have any character."""
    shown = "".join(each if each.isprintable() else "?" for each in sentence)
    return shown if len(shown) <= MAX_SENTENCE else f"{shown[: MAX_SENTENCE - 1]}…"
