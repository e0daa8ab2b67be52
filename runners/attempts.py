"""Attempt folders: their layout, what their state on disk means, and how they are ended.

The folder is the truth about an attempt on this host. Its lock says whether a supervisor
lives; its files say how far it came. A restarted agent reads nothing else.
"""

import contextlib
import re
import secrets
import shutil
import time
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from runners.jobspec.data import DATA_FOLDER
from runners.messages import ArtefactBody, ExitRecord, RunRequest
from runners.preflight_messages import Needs
from runners.reasons import Reason
from runners.spool import Event, SpoolReader, SpoolWriter
from runners.supervision import procfs, record

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class Claim(BaseModel):
    """What this host said when it claimed: written before it asks, so a lost reply is no loss."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fence: str
    claim_id: str
    boot_id: str
    needs: Needs | None = None  # what is looked for before each time that it asks


class Verdict(StrEnum):
    """What the state of a folder on disk means."""

    CLAIMING = "claiming"  # no spec yet: the claim has to be repeated
    WAITING = "waiting"  # in a scheduler's queue
    RUNNING = "running"  # a supervisor holds the lock
    FINISHED = "finished"
    HOST_REBOOTED = "host_rebooted"
    SUPERVISOR_LOST = "supervisor_lost"
    NEVER_STARTED = "never_started"
    TOMBSTONE = "tombstone"  # the claim was refused
    FORGOTTEN = "forgotten"  # the server holds all of it; only the output is left
    DAMAGED = "damaged"


# Verdicts of a folder whose supervisor is gone without a record: the reaper writes it.
LOST = {
    Verdict.HOST_REBOOTED: Reason.HOST_REBOOTED,
    Verdict.SUPERVISOR_LOST: Reason.SUPERVISOR_LOST,
    Verdict.NEVER_STARTED: Reason.NEVER_STARTED,
}


class AttemptFolder:
    """One attempt on this host's disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.attempt_id = path.name
        self.spool = path / record.SPOOL
        self.lock = path / record.LOCK
        self.ship_lock = path / "ship.lock"
        self.spec = path / "spec.json"
        self.output = path / "output"
        self.checkpoint = path / "checkpoint"
        self.data = path / DATA_FOLDER
        self._claim = path / "claim.json"
        self._acked = path / "acked.json"
        self._artefacts = path / "artefacts.json"
        self._settled = path / "settled"
        self._tombstone = path / "tombstone"
        self._forgotten = path / "forgotten"
        self._uploaded = path / "uploaded"

    # Documents

    def claim(self) -> Claim | None:
        """Return what this host claimed with, or None when that cannot be read."""
        try:
            return Claim.model_validate_json(self._claim.read_bytes())
        except (OSError, ValidationError):
            return None

    def make_claim(self, fence: str, boot_id: str, needs: Needs | None = None) -> Claim:
        """Create the folder with a claim of its own, or return the claim that it has."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if claim := self.claim():
            return claim
        claim = Claim(fence=fence, claim_id=secrets.token_hex(16), boot_id=boot_id, needs=needs)
        record.write_json(self._claim, claim.model_dump(mode="json"))
        return claim

    def request(self) -> RunRequest | None:
        """Return what is to be run, or None when that cannot be read."""
        try:
            return RunRequest.model_validate_json(self.spec.read_bytes())
        except (OSError, ValidationError):
            return None

    def exit_record(self) -> ExitRecord | None:
        """Return how the attempt ended, or None when it did not or the file is damaged."""
        try:
            return ExitRecord.model_validate_json((self.path / record.EXIT_RECORD).read_bytes())
        except (OSError, ValidationError):
            return None

    def acked_seq(self) -> int:
        """Return the highest event number that the server is known to hold."""
        return int((record.read_json(self._acked) or {}).get("acked_seq", 0))

    def save_acked_seq(self, acked_seq: int) -> None:
        """Remember the highest event number that the server holds."""
        record.write_json(self._acked, {"acked_seq": acked_seq})

    def artefacts(self) -> list[ArtefactBody]:
        """Return what an ended attempt announced as its output, but nothing ill-formed."""
        listed = (record.read_json(self._artefacts) or {}).get("artefacts", [])
        return [artefact for body in listed if (artefact := _artefact(body))]

    def _list_artefacts(self) -> None:
        """Copy the announced output out of the spool, which goes before the upload is done."""
        reader, seq = SpoolReader(self.spool), 0
        found: dict[str, object] = {}  # by name: the last announcement is the one that holds
        while events := reader.read_after(seq):
            seq = events[-1]["seq"]
            found |= {
                event["body"]["name"]: event["body"]
                for event in events
                if event["kind"] == "artefact"
            }
        record.write_json(self._artefacts, {"artefacts": list(found.values())})

    # Marks

    @property
    def is_settled(self) -> bool:
        """Tell whether the exit record stands and the spool ends with it."""
        return self._settled.exists()

    @property
    def is_stored(self) -> bool:
        """Tell whether the server holds every event: it knows the artefacts by then."""
        return self._forgotten.exists() or (
            self.is_settled and self.acked_seq() >= SpoolReader(self.spool).last_seq()
        )

    @property
    def is_uploaded(self) -> bool:
        """Tell whether nothing is left to upload."""
        return self._uploaded.exists()

    def mark_uploaded(self) -> None:
        """Note that nothing is left to upload."""
        self._uploaded.touch()

    def bury(self) -> None:
        """Note that the claim was refused: this folder never becomes a process."""
        self._tombstone.touch()

    def forget(self) -> None:
        """Free the spool, whose events the server holds, and fetched data; the output stays."""
        self._forgotten.touch()
        shutil.rmtree(self.spool, ignore_errors=True)
        shutil.rmtree(self.data, ignore_errors=True)

    # State

    def judge(self, boot_id: str) -> Verdict:
        """Return what the folder's state means on a machine in this boot."""
        for mark, verdict in (
            (self._tombstone, Verdict.TOMBSTONE),
            (self._forgotten, Verdict.FORGOTTEN),
        ):
            if mark.exists():
                return verdict
        if record.is_locked(self.lock):
            return Verdict.RUNNING
        claim = self.claim()
        if claim is None or (self.spec.exists() and self.request() is None):
            return Verdict.DAMAGED
        return self._judge_unlocked(claim, boot_id)

    def _judge_unlocked(self, claim: Claim, boot_id: str) -> Verdict:
        if self.exit_record():
            return Verdict.FINISHED
        if not self.spec.exists():
            return Verdict.CLAIMING
        if claim.boot_id != boot_id:
            return Verdict.HOST_REBOOTED
        if (self.path / record.SUPERVISOR).exists():
            return Verdict.SUPERVISOR_LOST
        return Verdict.NEVER_STARTED

    def settle(self, reason: Reason, explanation: str = "") -> None:
        """Make exit record and spool agree on one end, and leave no process of the attempt.

        An end that the supervisor recorded, in either place, stands; else it is ``reason``.
        Does nothing while a supervisor lives.
        """
        with contextlib.suppress(record.LockedError), record.locked(self.lock):
            procfs.sweep(self.attempt_id)
            record.remove_secrets(self.path)
            spool = SpoolWriter(self.spool)
            last = self._last_event()
            told = last["body"] if last and last["kind"] == "exited" else None
            ended = self.exit_record()
            if ended is None:
                written = told or self._reaper_record(reason, explanation)
                ended = ExitRecord.model_validate(record.write_exit_record(self.path, written))
            if told is None:
                spool.append("exited", ended.model_dump(mode="json"))
            spool.close()
            self._list_artefacts()
            self._settled.touch()

    def _last_event(self) -> Event | None:
        reader = SpoolReader(self.spool)
        last = reader.read_after(max(reader.last_seq() - 1, 0))
        return last[-1] if last else None

    @staticmethod
    def _reaper_record(reason: Reason, explanation: str) -> record.Record:
        return {
            "exit_code": None,
            "signal": None,
            "reason": reason,
            "by": "reaper",
            "started_at_ms": None,
            "ended_at_ms": time.time_ns() // 1_000_000,
            "last_lines": [explanation] if explanation else [],
        }

    def quarantine(self, place: Path) -> Path:
        """Move a damaged folder aside, where a person can look at it; return where it is."""
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = place / f"{self.attempt_id}-{secrets.token_hex(4)}"
        return self.path.rename(target)


def attempt_folders(attempts_dir: Path) -> list[AttemptFolder]:
    """Return the attempts on disk, in the order of their ids."""
    return [
        AttemptFolder(path)
        for path in sorted(attempts_dir.iterdir())
        if path.is_dir() and ID.fullmatch(path.name)
    ]


def _artefact(body: object) -> ArtefactBody | None:
    """Return an announced artefact; None where its name or files are no such thing."""
    try:
        return ArtefactBody.model_validate(body)
    except ValidationError:
        return None
