"""A later attempt of a job goes on from what an earlier one left on this host.

Its checkpoint, answers or finished layers are moved, not copied: they may be several times as
large as the model. Where the earlier attempt ran on another host, the job begins anew.
"""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from runners.attempts import AttemptFolder
from runners.messages import RunRequest
from runners.supervision import record

log = logging.getLogger(__name__)

LOCK_PATIENCE_SECONDS = 5.0  # a supervisor says the end, and is itself gone a moment later


def take_over(
    folder: AttemptFolder, request: RunRequest, others: Iterable[AttemptFolder]
) -> AttemptFolder | None:
    """Move what the job's newest earlier attempt kept into ``folder``; return whose it was.

    An attempt whose supervisor lives keeps what it has. ``None``: nothing was there to move.
    """
    if any(folder.checkpoint.glob("*")):
        return None  # moved before this host's agent was ended
    for earlier in sorted(_earlier(request, others), key=_number, reverse=True):
        try:
            with record.locked(earlier.lock, LOCK_PATIENCE_SECONDS):
                _move(earlier.checkpoint, folder.checkpoint)
        except (record.LockedError, OSError) as error:
            log.warning("what %s left is not taken over: %s", earlier.attempt_id, error)
            continue
        log.info("attempt %s goes on from %s", folder.attempt_id, earlier.attempt_id)
        return earlier
    return None


def _earlier(request: RunRequest, others: Iterable[AttemptFolder]) -> Iterator[AttemptFolder]:
    for other in others:
        before = other.request() if any(other.checkpoint.glob("*")) else None
        if before and before.job_id == request.job_id and before.number < request.number:
            yield other


def _number(folder: AttemptFolder) -> int:
    request = folder.request()
    return request.number if request else 0


def _move(kept: Path, to: Path) -> None:
    if to.is_dir():
        to.rmdir()  # empty, as seen above
    kept.rename(to)
