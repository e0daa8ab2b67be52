"""Starts processes that answer one query about a model folder, under limits of time and memory.

The agent never parses what a model folder holds: a safetensors header of 95 MB took 850 MiB.
"""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from runners import launch

MIB = 2**20
MAX_ANSWER_CHARACTERS = 2**23
OUT_OF_MEMORY = ("MemoryError", "memory allocation of", "std::bad_alloc", "DefaultCPUAllocator")
# One thread: each thread of a BLAS library allocates buffers at import.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class FolderQuery(NamedTuple):
    """A model folder below one of the roots, and what a query about it needs to know."""

    folder: Path
    roots: tuple[Path, ...]
    host_dir: Path
    context_tokens: int = 0  # of a KV cache; 0: unknown


class Answer(NamedTuple):
    """The fields that a process printed, and why it ended early, if so."""

    fields: dict[str, Any]
    failure: str = ""


def run_query(
    query: FolderQuery,
    argv: Sequence[str],
    *,
    seconds: float,
    memory_bytes: int,
    env: Mapping[str, str] | None = None,
) -> Answer:
    """Return what a query process answers within ``seconds``; its parts so far if it ends early.

    The process limits its private memory to ``memory_bytes``.
    """
    document = {
        "folder": str(query.folder),
        "roots": [str(root) for root in query.roots],
        "context_tokens": query.context_tokens,
        "memory_bytes": memory_bytes,
    }
    base = launch.render_env(query.host_dir, 1, query.roots)
    try:
        ended = subprocess.run(
            argv,
            input=json.dumps(document) + "\n",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            env={**base, **ONE_THREAD, **(env or {})},
        )
    except subprocess.TimeoutExpired as expired:
        return Answer(_fields(expired.stdout), f"it took longer than {seconds:g} s, the limit")
    except OSError as error:
        return Answer({}, f"its reader does not start: {error.strerror}")
    return Answer(_fields(ended.stdout), _failure(ended, memory_bytes))


def _fields(output: bytes | str | None) -> dict[str, Any]:
    """Return the fields of all complete lines; a later line replaces an earlier one's."""
    text = os.fsdecode(output or "")[:MAX_ANSWER_CHARACTERS]
    fields: dict[str, Any] = {}
    for line in text.split("\n")[:-1]:
        try:
            fields |= json.loads(line)
        except (ValueError, TypeError):  # a library's own output
            continue
    return fields


def _failure(ended: subprocess.CompletedProcess[str], memory_bytes: int) -> str:
    if not ended.returncode:
        return ""
    if any(word in ended.stderr for word in OUT_OF_MEMORY):
        return f"it needs more than {memory_bytes // MIB} MiB of memory, the limit"
    if ended.returncode < 0:
        return f"its reader was ended by {signal.Signals(-ended.returncode).name}"
    return f"its reader failed: {(ended.stderr.strip().splitlines() or ['?'])[-1][:150]}"
