"""Reject uploads before the disk is full; the senders keep their data and retry."""

import shutil
from pathlib import Path

from webapp.core.problems import BusyProblem

MIN_FREE_BYTES = 256 * 1024**2
PAUSE_SECONDS = 60


def check_room(folder: Path, needed_bytes: int) -> None:
    """Check that the disk of ``folder`` has enough free space.

    Raises:
        BusyProblem: less than ``needed_bytes`` are free.
    """
    if shutil.disk_usage(folder).free < needed_bytes:
        raise BusyProblem(
            "disk_full",
            "The server's disk is nearly full. What hosts hold is kept there and sent later.",
            retry_after_seconds=PAUSE_SECONDS,
        )
