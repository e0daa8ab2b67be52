"""Prevents torchrun restarts after permanent errors.

torchrun restarts every rank after any failure. Bad input, a diverged training or insufficient
memory would fail again: the rank records the error, and restarted ranks of the same attempt
exit with it at once.
"""

import os
import sys
from pathlib import Path

from runners.supervision import oom

COUNT_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
NOTE = "ends-again.txt"


class EndsAgainError(Exception):
    """A permanent error, which would recur after a restart."""

    prefix = ""


def note_end(folder: Path, error: Exception) -> None:
    """Record a permanent error for restarted ranks; does nothing without torchrun."""
    if COUNT_VARIABLE not in os.environ:
        return
    named = getattr(error, "prefix", "") or f"{type(error).__module__}.{type(error).__qualname__}"
    message = f"{named}: {error}"
    has_no_memory = oom.GPU.search(message) or oom.HOST.search(message)
    if isinstance(error, EndsAgainError) or has_no_memory:
        (folder / NOTE).write_text(message)


def end_as_before(folder: Path, code: int) -> None:
    """Exit with the recorded error of an earlier rank of this attempt, if there is one."""
    path = folder / NOTE
    if os.environ.get(COUNT_VARIABLE, "0") != "0" and path.exists():
        sys.stderr.write(f"{path.read_text()}\n")
        sys.exit(code)
