"""Ranks that torchrun starts again after a loss, but for an end that would come again.

torchrun starts every rank anew whatever ended the first one. Bad input, a diverged training or
too little memory would only end it once more: the rank notes it, and the next one of the same
attempt repeats the words instead of the work.
"""

import os
import sys
from pathlib import Path

from runners.supervision import oom

COUNT_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
NOTE = "ends-again.txt"


class EndsAgainError(Exception):
    """What would end the job at every try, whichever rank met it first."""

    prefix = ""


def note_end(folder: Path, error: Exception) -> None:
    """Leave what ended this rank for those that are started after it, if it would end them too.

    Where torchrun started none, nobody comes after it, and nothing is left.
    """
    if COUNT_VARIABLE not in os.environ:
        return
    named = getattr(error, "prefix", "") or f"{type(error).__module__}.{type(error).__qualname__}"
    said = f"{named}: {error}"
    has_no_memory = oom.GPU.search(said) or oom.HOST.search(said)
    if isinstance(error, EndsAgainError) or has_no_memory:
        (folder / NOTE).write_text(said)


def end_as_before(folder: Path, code: int) -> None:
    """Exit with the words of an earlier rank of this attempt, where they hold for this one."""
    path = folder / NOTE
    if os.environ.get(COUNT_VARIABLE, "0") != "0" and path.exists():
        sys.stderr.write(f"{path.read_text()}\n")
        sys.exit(code)
