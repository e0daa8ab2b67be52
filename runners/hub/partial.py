"""A blob that is being fetched: its bytes so far, which of them are there, and who fetches it.

Bytes lie at their place in ``blobs/<etag>.ranges.incomplete``. ``<etag>.progress.incomplete``
counts those of each segment, after they are written: kill -9 costs the block in flight. A machine
that loses power may keep a count without its bytes, which the digest finds. The name is not
``<etag>.incomplete``, to whose end earlier releases of huggingface_hub append.

The lock is huggingface_hub's own, so that its downloads and these wait for each other.
"""

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from runners.hub.listing import Digest

SEGMENT_BYTES = 64 * 2**20  # of one request; a file has as many at once as there are connections
HASH_BYTES = 4 * 2**20
_HEADER = struct.Struct("<QQ")  # size of the file, size of a segment
_COUNT = struct.Struct("<Q")


class Segment(NamedTuple):
    """A range of a file, ``end`` not included."""

    number: int
    start: int
    end: int


class Partial:
    """The bytes of a blob that have arrived; held by whoever has the blob's lock."""

    def __init__(self, blob: Path, size: int) -> None:
        self.blob = blob
        self.size = size
        self.path, self.progress_path = paths(blob)
        count = max(1, -(-size // SEGMENT_BYTES))
        self.segments = [
            Segment(number, number * SEGMENT_BYTES, min(size, (number + 1) * SEGMENT_BYTES))
            for number in range(count)
        ]
        self._counts = [0] * count
        self.done = 0  # bytes that have arrived
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._data = os.open(self.path, flags, 0o666)
        try:
            self._progress = os.open(self.progress_path, flags, 0o666)
        except OSError:
            os.close(self._data)
            raise
        if not self._read():
            self.restart()

    def _read(self) -> bool:
        """Return whether an earlier download left counts that fit its bytes."""
        data = os.pread(self._progress, self._header_bytes + 1, 0)
        if len(data) != self._header_bytes or os.fstat(self._data).st_size != self.size:
            return False
        if _HEADER.unpack_from(data) != (self.size, SEGMENT_BYTES):
            return False
        counts = [count for (count,) in _COUNT.iter_unpack(data[_HEADER.size :])]
        if any(
            count > each.end - each.start
            for count, each in zip(counts, self.segments, strict=True)
        ):
            return False
        self._counts, self.done = counts, sum(counts)
        return True

    @property
    def _header_bytes(self) -> int:
        return _HEADER.size + _COUNT.size * len(self.segments)

    def restart(self) -> None:
        """Forget what has arrived."""
        self._counts, self.done = [0] * len(self.segments), 0
        os.ftruncate(self._progress, 0)
        os.ftruncate(self._data, 0)
        os.ftruncate(self._data, self.size)
        os.pwrite(
            self._progress,
            _HEADER.pack(self.size, SEGMENT_BYTES) + bytes(_COUNT.size * len(self.segments)),
            0,
        )

    @property
    def handle(self) -> int:
        """The open file of the bytes."""
        return self._data

    def position(self, segment: Segment) -> int:
        """Return where a segment goes on."""
        return segment.start + self._counts[segment.number]

    def write(self, segment: Segment, data: bytes | memoryview) -> None:
        """Put bytes where a segment goes on.

        Raises:
            OSError: the disk is full, or fails.
        """
        view, at = memoryview(data), self.position(segment)
        while view:
            written = os.pwrite(self._data, view, at)
            view, at = view[written:], at + written
        self.done += len(data)
        self._counts[segment.number] = at - segment.start
        place = _HEADER.size + _COUNT.size * segment.number
        os.pwrite(self._progress, _COUNT.pack(at - segment.start), place)

    @staticmethod
    def digest(handle: int, beginning: "Digest", should_stop: Callable[[], bool]) -> str:
        """Return the digest of a file's bytes, on the disk by then; "" if it was stopped.

        Closes the handle: the thread that computes may outlive its task.
        """
        with os.fdopen(handle, "rb", buffering=0) as file:
            os.fsync(file.fileno())
            at = 0
            while block := os.pread(file.fileno(), HASH_BYTES, at):
                if should_stop():
                    return ""
                beginning.update(block)
                at += len(block)
        return beginning.hexdigest()

    def finish(self) -> None:
        """Make the blob of the bytes."""
        with contextlib.suppress(FileNotFoundError):  # another one, where locks do not hold
            self.path.replace(self.blob)
        self.progress_path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Delete the bytes."""
        self.path.unlink(missing_ok=True)
        self.progress_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files; what has arrived is kept."""
        os.close(self._data)
        os.close(self._progress)


def paths(blob: Path) -> tuple[Path, Path]:
    """Return where the bytes of a blob that is being fetched lie, and their counts."""
    return (
        blob.with_name(f"{blob.name}.ranges.incomplete"),
        blob.with_name(f"{blob.name}.progress.incomplete"),
    )


def arrived(blob: Path, size: int, *, by_others: bool = False) -> int:
    """Return the bytes of an unfinished blob that have arrived.

    ``by_others``: those that huggingface_hub fetches count too.
    """
    _, progress = paths(blob)
    with contextlib.suppress(OSError, struct.error):
        data = progress.read_bytes()
        if len(data) > _HEADER.size and _HEADER.unpack_from(data)[0] == size:
            counts = _COUNT.iter_unpack(data[_HEADER.size :])
            return min(size, sum(int(count) for (count,) in counts))
    sizes = [0]
    for path in blob.parent.glob(f"{blob.name}.*incomplete") if by_others else ():
        with contextlib.suppress(OSError):
            sizes.append(path.stat().st_blocks * 512)
    return min(size, max(sizes))


def lock_path(cache: Path, repository_folder: Path, etag: str) -> Path:
    """Return the lock of a blob, as huggingface_hub names it."""
    return cache / ".locks" / repository_folder.name / f"{etag}.lock"


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold a lock; False if another process does. The kernel ends it with its holder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
    try:
        yield _holds(handle)
    finally:
        os.close(handle)


def _holds(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(handle).st_nlink > 0  # one that was deleted meanwhile keeps nobody out
