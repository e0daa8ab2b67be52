"""Stores the highest epoch received from the server, to detect a restored backup.

A lower epoch means that the server lost state: until it sends a higher one, this host starts,
stops and forgets nothing on its orders. Running jobs continue and ship events.
"""

from pathlib import Path

from pydantic import ValidationError

from runners.config import write_secret
from runners.messages import BeatReply, EpochShown

EPOCH = "epoch.json"


class EpochMemory:
    """The content of ``epoch.json`` in the host's folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / EPOCH
        self.seen = self._read()

    def heed(self, reply: BeatReply) -> tuple[BeatReply, str]:
        """Return the reply without unsafe orders, and a message if the epoch is behind."""
        epoch = reply.epoch
        if epoch is None or (self.seen is not None and epoch.number == self.seen.number):
            return reply, ""
        if self.seen is not None and epoch.number < self.seen.number:
            suspended = {"wanted": (), "stop": (), "forget": (), "rotate": False}
            return reply.model_copy(update=suspended), (
                f"The server shows epoch {epoch.number}, but this host has seen "
                f"{self.seen.number}: it was restored from a backup. Nothing is started or "
                "stopped for it until `manage.py epoch raise` was run there."
            )
        write_secret(self._path, epoch.model_dump_json())
        self.seen = epoch
        return reply, ""

    def forget(self) -> None:
        """Delete the stored epoch after a new enrolment."""
        self._path.unlink(missing_ok=True)
        self.seen = None

    def _read(self) -> EpochShown | None:
        try:
            return EpochShown.model_validate_json(self._path.read_bytes())
        except (OSError, ValidationError):
            return None
