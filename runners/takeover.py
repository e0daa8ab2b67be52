"""Lets a later attempt of a job resume from an earlier attempt's files on this host.

Checkpoint, answers or finished layers are moved, not copied: they may be several times as
large as the model. If the earlier attempt ran on another host, the job starts from scratch.
"""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from runners.attempts import AttemptFolder
from runners.messages import RunRequest
from runners.supervision import record

log = logging.getLogger(__name__)

LOCK_PATIENCE_SECONDS = 5.0  # a supervisor ends shortly after it reports the exit


def take_over(
    folder: AttemptFolder, request: RunRequest, others: Iterable[AttemptFolder]
) -> AttemptFolder | None:
    """Move the checkpoint of the job's newest earlier attempt; return that attempt or None.

    Skips attempts whose supervisor runs. ``None``: there was nothing to move.
    """
    if any(folder.checkpoint.glob("*")):
        return None  # already moved before the agent restarted
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


def _move(source: Path, to: Path) -> None:
    if to.is_dir():
        to.rmdir()  # empty, as checked above
    source.rename(to)
