"""Preflight's checks of a model's size: files, planner and engine. They never fail.

Queries run at once, each in a process of its own. A claim may be repeated every few seconds, so
their sentences are kept for ten minutes, or until the folder changes.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from runners import engine_counts
from runners.config import HostDir
from runners.engine_counts import EngineCount
from runners.engine_logs import last_start
from runners.environments.store import Store
from runners.folder_queries import FolderQuery
from runners.preflight_messages import MAX_SENTENCE, PreflightCheck, yes
from runners.stored_weights import GIB, StoredWeights, has_safetensors, weights_of

KEPT_SECONDS = 600.0
NAMES = (".", "config.json", "model.safetensors.index.json", "model.safetensors")
LLAMACPP, VLLM = "llamacpp", "vllm"


class Wanted(NamedTuple):
    """What of an attempt's needs decides which engine is queried, and on what host."""

    environment: str
    memory_bytes: int  # the predicted peak's lower bound, per device
    is_login_node: bool  # of Slurm, where no engine is queried: jobs run on other nodes


def checks(wanted: Wanted, query: FolderQuery) -> tuple[PreflightCheck, ...]:
    """Return what is known of a folder's size."""
    period = int(time.monotonic() / KEPT_SECONDS)
    try:
        return _checks(wanted, query, _stamp(query.folder), period)
    except OSError:  # the folder is gone again; the job reports it
        return ()


def _stamp(folder: Path) -> tuple[int, ...]:
    """Return the times of change of a folder and of the files that describe its weights."""
    paths = [folder / name for name in NAMES]
    return tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in paths)


@lru_cache(maxsize=32)
def _checks(wanted: Wanted, query: FolderQuery, *_: object) -> tuple[PreflightCheck, ...]:
    if has_safetensors(query):
        return (_safetensors(wanted, query), *_earlier(wanted, query))
    is_gguf = wanted.environment == LLAMACPP and not wanted.is_login_node
    return (_gguf(wanted, query),) if is_gguf and engine_counts.llama_is_there() else ()


def _safetensors(wanted: Wanted, query: FolderQuery) -> PreflightCheck:
    store = Store(HostDir(query.host_dir))
    has_engine = not wanted.is_login_node and (query.folder / "config.json").is_file()
    python = engine_counts.interpreter(wanted.environment, store) if has_engine else None
    built: Future[EngineCount] | None = None
    with ThreadPoolExecutor() as pool:
        if python is not None:
            built = pool.submit(engine_counts.transformers_count, query, python)
        found = weights_of(query)
    sentence = found.sentence
    if built is not None:
        sentence += f" {engine_counts.compared(built.result(), found.counted_bytes)}"
    check = yes("weights", _printed(sentence), **_figures(found, built))
    return check.model_copy(update={"remedy": found.remedy})


def _figures(found: StoredWeights, built: Future[EngineCount] | None) -> dict[str, float]:
    figures = {
        "stored_bytes": found.stored_bytes,
        "counted_bytes": found.counted_bytes,
        "engine_bytes": built.result().weight_bytes if built is not None else None,
    }
    return {name: float(value) for name, value in figures.items() if value}


def _earlier(wanted: Wanted, query: FolderQuery) -> Iterator[PreflightCheck]:
    """Yield what vLLM logged at an earlier start with the folder."""
    if wanted.environment != VLLM:
        return
    if found := last_start(query.folder, HostDir(query.host_dir).attempts):
        yield yes("vLLM", _printed(found))


def _gguf(wanted: Wanted, query: FolderQuery) -> PreflightCheck:
    count = engine_counts.llama_count(query)
    sentence = count.sentence
    if wanted.memory_bytes:
        needed = wanted.memory_bytes / GIB
        sentence += f" The planner predicts at least {needed:.2f} GiB for the job."
    figures = {"engine_bytes": count.weight_bytes, "needed_bytes": wanted.memory_bytes}
    shown = {name: float(value) for name, value in figures.items() if value}
    return yes("llama.cpp", _printed(sentence), **shown)


def _printed(sentence: str) -> str:
    """Return a sentence that a message may hold: file names and errors may have any character."""
    shown = "".join(each if each.isprintable() else "?" for each in sentence)
    return shown if len(shown) <= MAX_SENTENCE else f"{shown[: MAX_SENTENCE - 1]}…"
