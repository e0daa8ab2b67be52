"""Operations on a host's attempts that need neither agent nor server."""

import time
from collections.abc import Iterator
from typing import NamedTuple

from runners.attempts import Verdict, attempt_folders
from runners.client import ServerClient
from runners.config import HostDir
from runners.messages import StopOrder
from runners.reasons import Reason
from runners.reconcile import Reconciler
from runners.supervision import procfs

STOP_ALL_SECONDS = 30.0
GRACE_SECONDS = 5.0


class Stopped(NamedTuple):
    """The result of ``stop_all``: attempts that ended, and those still running."""

    ended: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    why: str = ""  # why stop orders could not be written


def stop_all(
    host_dir: HostDir,
    grace_seconds: float = GRACE_SECONDS,
    reason: Reason = Reason.STOPPED_BY_OPERATOR,
    patience_seconds: float = STOP_ALL_SECONDS,
) -> Stopped:
    """Stop every running attempt, including ones that start meanwhile, and wait for their end.

    Gives up after ``patience_seconds``: attempts with a hanging supervisor count as running.
    """
    if not host_dir.attempts.is_dir():
        return Stopped()
    reconciler = Reconciler(
        host_dir, host_dir.config(), ServerClient("http://127.0.0.1"), boot_id=procfs.boot_id()
    )
    deadline = time.monotonic() + patience_seconds
    stopped: dict[str, None] = {}
    why = ""
    while running := [folder.attempt_id for folder in reconciler.running()]:
        why = ""
        for attempt_id in running:
            order = StopOrder(attempt_id=attempt_id, reason=reason, grace_seconds=grace_seconds)
            try:
                reconciler.stop(order)
            except OSError as error:  # such as a full disk; retried until the deadline
                why = error.strerror or str(error)
        stopped |= dict.fromkeys(running)
        if time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    ended = tuple(attempt_id for attempt_id in stopped if attempt_id not in running)
    return Stopped(ended, tuple(running), why if running else "")


def summaries(host_dir: HostDir) -> Iterator[str]:
    """Yield one line per attempt on disk: id, state and end reason."""
    if not host_dir.attempts.is_dir():
        return
    boot_id = procfs.boot_id()
    for folder in attempt_folders(host_dir.attempts):
        verdict = folder.verdict(boot_id)
        ended = folder.exit_record()
        how = f"  {ended.reason}" if ended and verdict is not Verdict.RUNNING else ""
        yield f"{folder.attempt_id}  {verdict}{how}"
