"""What vLLM logged about its memory at an earlier start with a model folder on this host.

vLLM profiles its memory at every start and has no command that does only this. An attempt's
folder keeps its output, so the newest start that got as far is read.
Sources of the lines: https://github.com/vllm-project/vllm/pull/13596 (tokens and requests),
https://github.com/vllm-project/vllm/issues/21348 (memory).
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from runners.attempts import AttemptFolder, attempt_folders
from runners.jobspec import FolderModel, ServeSpec
from runners.supervision.output import HEAD_BYTES

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_ATTEMPTS = 200  # the newest are looked through
LINES = {
    "weights": re.compile(r"Model loading took ([\d.]+) Gi?B"),
    "cache": re.compile(r"Available KV cache memory: (-?[\d.]+) GiB"),
    "tokens": re.compile(r"GPU KV cache size: ([\d,]+) tokens"),
    "requests": re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x"),
}


def last_start(folder: Path, attempts_dir: Path) -> str:
    """Return a sentence on vLLM's newest start with a model folder, "" if there was none."""
    for attempt in _starts(folder, attempts_dir):
        found = memory_in(_head(attempt.path / "stderr.log"))
        if found:
            return (
                f"vLLM's last start with it here, {attempt.attempt_id}, logged per GPU: {found}. "
                "Its settings may have been others."
            )
    return ""


def memory_in(log: str) -> str:
    """Return the memory in a vLLM log in words, "" if it does not hold the KV cache's."""
    found = {name: match for name, line in LINES.items() if (match := line.search(log))}
    if not found.keys() & {"cache", "tokens"}:
        return ""
    words = {
        "weights": "{} GiB of weights",
        "cache": "{} GiB for the KV cache",
        "tokens": "a KV cache of {} tokens",
        "requests": "room for {1} requests of {0} tokens",
    }
    return ", ".join(words[name].format(*match.groups()) for name, match in found.items())


def _starts(folder: Path, attempts_dir: Path) -> Iterator[AttemptFolder]:
    """Yield the attempts that served a model folder with vLLM, the newest first."""
    newest = sorted(attempt_folders(attempts_dir), key=_changed_at, reverse=True)
    for attempt in newest[:MAX_ATTEMPTS]:
        request = attempt.request()
        if request is None or not isinstance(request.spec, ServeSpec):
            continue
        if request.spec.engine == "vllm" and request.spec.model == FolderModel(path=str(folder)):
            yield attempt


def _changed_at(attempt: AttemptFolder) -> float:
    try:
        return attempt.spec.stat().st_mtime
    except OSError:  # not started yet
        return 0.0


def _head(path: Path) -> str:
    try:
        with os.fdopen(os.open(path, _READ), "rb") as file:
            return file.read(HEAD_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
