"""What ended attempts keep on a host's disk: its sizes, and its deletion on an operator's order.

An attempt's folder keeps the checkpoint that a resumed job goes on from and the output, such as a
model that other jobs on this host use. Neither is ever deleted without an order.
"""

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from runners.launchers.attempts import AttemptFolder, attempt_folders
from runners.shared.config import HostDir
from runners.shared.messages import MAX_STORED, FilePart, FilesOrder, StoredFiles
from runners.shared.timing import LOCK_PROBE_SECONDS, scale_duration
from runners.supervision import child

MEASURE_SECONDS = 600.0
LOOK_SECONDS = scale_duration(5.0, least=0.2)  # for attempts that have ended meanwhile
RETRY_SECONDS = scale_duration(10.0, least=0.2)  # while orders wait
DELETED = ".deleted"  # suffix of what is being deleted, so that nothing half deleted is used

log = logging.getLogger(__name__)


class JobFiles:
    """The files of one host's ended attempts; ``step`` runs in a thread of its own."""

    def __init__(self, host_dir: HostDir) -> None:
        self._host_dir = host_dir
        self._orders: Mapping[str, FilePart] = {}
        self._current: tuple[StoredFiles, ...] | None = None  # None: not measured yet
        self._sent: tuple[StoredFiles, ...] | None = None
        self._reported: tuple[StoredFiles, ...] | None = None
        self._problems: Mapping[str, str] = {}  # by attempt
        self._seen: frozenset[str] | None = None  # ended attempts; None: not looked yet
        self._new: frozenset[str] = frozenset()  # ended since: reported also if they keep nothing
        self._measured_at = 0.0
        self._lock = threading.Lock()

    @property
    def problems(self) -> list[str]:
        """Return why orders could not be carried out, one sentence each."""
        return list(self._problems.values())

    def obey(self, orders: Sequence[FilesOrder]) -> bool:
        """Take the pending orders for the next step; return whether there are new ones.

        The server repeats an order until a report shows that it was carried out.
        """
        pending = {order.attempt_id: order.part for order in orders}
        with self._lock:
            is_new = any(self._orders.get(key) != part for key, part in pending.items())
            self._orders = pending
        return is_new

    def step(self) -> float:
        """Carry out the pending orders and measure what is new; return the seconds until the next.

        Without orders it measures when an attempt has ended since, and from time to time.
        """
        with self._lock:
            orders = dict(self._orders)
        folders = self._ended()
        ended = frozenset(folder.attempt_id for folder in folders)
        is_recent = time.monotonic() - self._measured_at < MEASURE_SECONDS
        if not orders and ended == self._seen and is_recent:
            return LOOK_SECONDS
        self._new |= ended - self._seen if self._seen is not None else frozenset()
        self._seen, self._measured_at = ended, time.monotonic()
        problems: dict[str, str] = {}
        for folder in folders:
            try:
                _delete_rests(folder)
                if part := orders.get(folder.attempt_id):
                    _delete(folder, part)
            except (OSError, child.LockedError) as error:
                log.warning("files of %s are not deleted: %s", folder.attempt_id, error)
                problems[folder.attempt_id] = (
                    f"The files of attempt {folder.attempt_id} were not deleted: {error}."[:300]
                )
        self._problems = problems
        measured = self.measured()
        is_changed = bool(orders) or measured != self._current
        self._current = measured if is_changed else self._current
        return RETRY_SECONDS if orders else LOOK_SECONDS

    def measured(self) -> tuple[StoredFiles, ...]:
        """Return the bytes that each ended attempt keeps, the largest first; of new ones also 0.

        A file that several attempts share by hard links counts once, for the newest.
        """
        counted: set[tuple[int, int]] = set()
        found = []
        for folder in reversed(self._ended()):
            checkpoint = _size(folder.checkpoint, counted)
            output = _size(folder.output, counted)
            if checkpoint or output or folder.attempt_id in self._new:
                found.append(
                    StoredFiles(
                        attempt_id=folder.attempt_id,
                        checkpoint_bytes=checkpoint,
                        output_bytes=output,
                    )
                )
        found.sort(key=lambda each: each.checkpoint_bytes + each.output_bytes, reverse=True)
        return tuple(found[:MAX_STORED])

    def news(self, *, everything: bool) -> tuple[StoredFiles, ...] | None:
        """Return what is kept, or None if that is unknown or unchanged since the last report."""
        self._sent = self._current
        return self._sent if everything or self._sent is not self._reported else None

    def mark_reported(self) -> None:
        """Record that the server received the last report."""
        self._reported = self._sent

    def _ended(self) -> list[AttemptFolder]:
        """Return the ended attempts of which the server stores every event."""
        if not self._host_dir.attempts.is_dir():
            return []
        return [
            folder
            for folder in attempt_folders(self._host_dir.attempts)
            if folder.is_settled and folder.is_stored
        ]


def _delete(folder: AttemptFolder, part: FilePart) -> None:
    """Delete an attempt's checkpoint, or all that it keeps; an unfinished upload comes first."""
    if part == "all" and not folder.is_uploaded:
        return
    places = [folder.checkpoint, *([folder.output] if part == "all" else [])]
    with child.locked(folder.lock, LOCK_PROBE_SECONDS):
        for place in places:
            if place.exists():
                place.rename(place.with_name(place.name + DELETED))
    _delete_rests(folder)


def _delete_rests(folder: AttemptFolder) -> None:
    """Delete what an order, perhaps an interrupted one, set aside."""
    for rest in folder.path.glob(f"*{DELETED}"):
        log.info("deleting %s", rest)
        shutil.rmtree(rest)


def _size(folder: Path, counted: set[tuple[int, int]]) -> int:
    """Return the bytes of the files below a folder that are not ``counted`` yet, and add them."""
    total = 0
    for status in _files(folder):
        key = (status.st_dev, status.st_ino)
        if key not in counted:
            counted.add(key)
            total += status.st_size
    return total


def _files(folder: Path) -> Iterator[os.stat_result]:
    """Yield the status of every file below a folder; links are not followed."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _files(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    yield entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
