"""Remembers the highest epoch that the server said, so that a restored backup is noticed.

A server that shows a lower one has forgotten what it once knew: until it shows a higher one, this
host starts, stops and forgets nothing for it. What runs goes on, and ships.
"""

from pathlib import Path

from pydantic import ValidationError

from runners.config import write_secret
from runners.messages import BeatReply, EpochShown

EPOCH = "epoch.json"


class EpochMemory:
    """What lies in ``epoch.json`` of the host's folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / EPOCH
        self.seen = self._read()

    def heed(self, reply: BeatReply) -> tuple[BeatReply, str]:
        """Return what of a reply is to be done, and a sentence where the server is behind."""
        said = reply.epoch
        if said is None or (self.seen is not None and said.number == self.seen.number):
            return reply, ""
        if self.seen is not None and said.number < self.seen.number:
            held = {"wanted": (), "stop": (), "forget": (), "rotate": False}
            return reply.model_copy(update=held), (
                f"The server shows epoch {said.number}, but this host has seen "
                f"{self.seen.number}: it was restored from a backup. Nothing is started or "
                "stopped for it until `manage.py epoch raise` was run there."
            )
        write_secret(self._path, said.model_dump_json())
        self.seen = said
        return reply, ""

    def forget(self) -> None:
        """Begin anew: an operator enrolled this host again."""
        self._path.unlink(missing_ok=True)
        self.seen = None

    def _read(self) -> EpochShown | None:
        try:
            return EpochShown.model_validate_json(self._path.read_bytes())
        except (OSError, ValidationError):
            return None
