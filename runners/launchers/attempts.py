"""Attempt folders: layout, encoded state, secrets, and how attempts are ended."""

import contextlib
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from runners.hub.settings import HUB_TOKEN
from runners.jobspec.base import DATA_FOLDER
from runners.shared.messages import (
    ArtefactBody,
    EndpointBody,
    ExitRecord,
    Needs,
    RunRequest,
)
from runners.shared.reasons import Reason
from runners.shared.spool import Event, SpoolReader, SpoolWriter
from runners.supervision import child, procfs

log = logging.getLogger(__name__)
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class Claim(BaseModel):
    """A claim of this host, written before it is sent so that a lost reply can be retried."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fence: str
    claim_id: str
    boot_id: str
    needs: Needs | None = None  # checked before each claim request


class Verdict(StrEnum):
    """The state of an attempt, derived from its folder."""

    CLAIMING = "claiming"  # no spec yet: the claim must be repeated
    WAITING = "waiting"  # in a scheduler's queue
    RUNNING = "running"  # a supervisor holds the lock
    FINISHED = "finished"
    HOST_REBOOTED = "host_rebooted"
    SUPERVISOR_LOST = "supervisor_lost"
    NEVER_STARTED = "never_started"
    TOMBSTONE = "tombstone"  # the claim was rejected
    FORGOTTEN = "forgotten"  # the server stores all events; only the output is left
    DAMAGED = "damaged"


# States of an attempt that ended without an exit record, which the reaper then writes.
LOST_REASONS = {
    Verdict.HOST_REBOOTED: Reason.HOST_REBOOTED,
    Verdict.SUPERVISOR_LOST: Reason.SUPERVISOR_LOST,
    Verdict.NEVER_STARTED: Reason.NEVER_STARTED,
}


class AttemptFolder:
    """One attempt on this host's disk.

    Its documents may be of a newer agent that was taken back: fields unknown here are ignored, so
    that one that waits in a scheduler is not taken for a damaged one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.attempt_id = path.name
        self.spool = path / child.SPOOL
        self.lock = path / child.LOCK
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
        """Return this host's claim, or None when it cannot be read."""
        try:
            return Claim.model_validate_json(self._claim.read_bytes(), extra="ignore")
        except (OSError, ValidationError):
            return None

    def make_claim(self, fence: str, boot_id: str, needs: Needs | None = None) -> Claim:
        """Return the folder's claim; create folder and claim if they do not exist."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if claim := self.claim():
            return claim
        claim = Claim(fence=fence, claim_id=secrets.token_hex(16), boot_id=boot_id, needs=needs)
        child.write_json(self._claim, claim.model_dump(mode="json"))
        return claim

    def request(self) -> RunRequest | None:
        """Return the run request, or None when it cannot be read."""
        try:
            return RunRequest.model_validate_json(self.spec.read_bytes(), extra="ignore")
        except (OSError, ValidationError):
            return None

    def exit_record(self) -> ExitRecord | None:
        """Return the exit record, or None when there is none or it is damaged."""
        try:
            document = (self.path / child.EXIT_RECORD).read_bytes()
            return ExitRecord.model_validate_json(document, extra="ignore")
        except (OSError, ValidationError):
            return None

    def endpoint(self) -> EndpointBody | None:
        """Return the address that the running attempt reported, or None before it did."""
        try:
            document = (self.path / child.ENDPOINT).read_bytes()
            return EndpointBody.model_validate_json(document, extra="ignore")
        except (OSError, ValidationError):
            return None

    def acked_seq(self) -> int:
        """Return the highest event number that the server has acknowledged."""
        return int((child.read_json(self._acked) or {}).get("acked_seq", 0))

    def save_acked_seq(self, acked_seq: int) -> None:
        """Store the highest event number that the server has acknowledged."""
        child.write_json(self._acked, {"acked_seq": acked_seq})

    def artefacts(self) -> list[ArtefactBody]:
        """Return the artefacts that an ended attempt announced, without malformed ones."""
        listed = (child.read_json(self._artefacts) or {}).get("artefacts", [])
        return [artefact for body in listed if (artefact := _artefact(body))]

    def _list_artefacts(self) -> None:
        """Copy the announced artefacts from the spool, which is deleted before the upload ends."""
        reader, seq = SpoolReader(self.spool), 0
        artefacts_by_name: dict[str, object] = {}  # by name: the last announcement wins
        while events := reader.read_after(seq):
            seq = events[-1]["seq"]
            artefacts_by_name |= {
                event["body"]["name"]: event["body"]
                for event in events
                if event["kind"] == "artefact"
            }
        child.write_json(self._artefacts, {"artefacts": list(artefacts_by_name.values())})

    # Marks

    @property
    def is_settled(self) -> bool:
        """Return whether the exit record is written and is the spool's last event."""
        return self._settled.exists()

    @property
    def is_stored(self) -> bool:
        """Return whether the server stores every event, including the artefact announcements."""
        return self._forgotten.exists() or (
            self.is_settled and self.acked_seq() >= SpoolReader(self.spool).last_seq()
        )

    @property
    def is_over(self) -> bool:
        """Return whether its claim was rejected, or the server stores all of it."""
        return self._tombstone.exists() or self._forgotten.exists()

    @property
    def is_uploaded(self) -> bool:
        """Return whether nothing is left to upload."""
        return self._uploaded.exists()

    def mark_uploaded(self) -> None:
        """Record that nothing is left to upload."""
        self._uploaded.touch()

    def mark_claim_rejected(self) -> None:
        """Record that the server rejected the claim: this attempt never starts here."""
        self._tombstone.touch()

    def forget(self) -> None:
        """Delete the spool, whose events the server stores, and fetched data; keep the output."""
        self._forgotten.touch()
        shutil.rmtree(self.spool, ignore_errors=True)
        shutil.rmtree(self.data, ignore_errors=True)

    # State

    def verdict(self, boot_id: str) -> Verdict:
        """Return the attempt's state on a machine with this boot id."""
        for mark, verdict in (
            (self._tombstone, Verdict.TOMBSTONE),
            (self._forgotten, Verdict.FORGOTTEN),
        ):
            if mark.exists():
                return verdict
        if child.is_locked(self.lock):
            return Verdict.RUNNING
        claim = self.claim()
        if claim is None or (self.spec.exists() and self.request() is None):
            return Verdict.DAMAGED
        return self._verdict_unlocked(claim, boot_id)

    def _verdict_unlocked(self, claim: Claim, boot_id: str) -> Verdict:
        if self.exit_record():
            return Verdict.FINISHED
        if not self.spec.exists():
            return Verdict.CLAIMING
        if claim.boot_id != boot_id:
            return Verdict.HOST_REBOOTED
        if (self.path / child.SUPERVISOR).exists():
            return Verdict.SUPERVISOR_LOST
        return Verdict.NEVER_STARTED

    def settle(self, reason: Reason, explanation: str = "") -> None:
        """Complete exit record and spool consistently, and kill leftover processes.

        An end that the supervisor recorded in either place is kept; otherwise ``reason`` is
        recorded. Does nothing while a supervisor runs.
        """
        with contextlib.suppress(child.LockedError), child.locked(self.lock):
            procfs.sweep(self.attempt_id)
            child.remove_secrets(self.path)
            spool = SpoolWriter(self.spool)
            last = self._last_event()
            exited_body = last["body"] if last and last["kind"] == "exited" else None
            exit_record = self.exit_record()
            if exit_record is None:
                if exited_body is None:
                    log.warning("attempt %s ends: %s %s", self.attempt_id, reason, explanation)
                record_body = exited_body or self._reaper_record(reason, explanation)
                exit_record = ExitRecord.model_validate(
                    child.write_exit_record(self.path, record_body)
                )
            if exited_body is None:
                spool.append("exited", exit_record.model_dump(mode="json"))
            spool.close()
            self._list_artefacts()
            self._settled.touch()

    def _last_event(self) -> Event | None:
        reader = SpoolReader(self.spool)
        last = reader.read_after(max(reader.last_seq() - 1, 0))
        return last[-1] if last else None

    @staticmethod
    def _reaper_record(reason: Reason, explanation: str) -> child.Record:
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
        """Move a damaged folder to ``place`` for inspection; return its new path."""
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = place / f"{self.attempt_id}-{secrets.token_hex(4)}"
        return self.path.rename(target)


def attempt_folders(attempts_dir: Path) -> list[AttemptFolder]:
    """Return the attempts on disk, sorted by id."""
    return [
        AttemptFolder(path)
        for path in sorted(attempts_dir.iterdir())
        if path.is_dir() and ID.fullmatch(path.name)
    ]


def with_checkpoint(folders: Iterable[AttemptFolder], job_id: str) -> list[AttemptFolder]:
    """Return the attempts of a job that left a checkpoint, answers or layers, newest first."""
    found = [
        (request.number, folder)
        for folder in folders
        if any(folder.checkpoint.glob("*"))
        and (request := folder.request()) is not None
        and request.job_id == job_id
    ]
    return [folder for _, folder in sorted(found, key=lambda each: each[0], reverse=True)]


def _artefact(body: object) -> ArtefactBody | None:
    try:
        return ArtefactBody.model_validate(body)
    except ValidationError:
        return None


# Writes a job's secrets to files in the attempt's folder, readable only by their owner.
#
# They arrive with the claim and are deleted with the attempt. Spec, command and environment
# contain no values; environment variables contain the files' paths.


DIRECTORY_VARIABLE = "SLIPWAY_SECRETS_DIR"
# Variables of libraries that read a secret from a file, such as the Hugging Face Hub's token.
KNOWN_VARIABLES = {HUB_TOKEN: "HF_TOKEN_PATH"}


def write(attempt_dir: Path, values: Mapping[str, str]) -> dict[str, str]:
    """Write each value to its own file; return the environment variables with the paths."""
    if not values:
        return {}
    folder = attempt_dir / child.SECRETS
    child.remove_secrets(attempt_dir)
    folder.mkdir(mode=0o700)
    env = {DIRECTORY_VARIABLE: str(folder)}
    for name, value in values.items():
        path = folder / name
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(value)
        env[f"{name}_FILE"] = str(path)
        if name in KNOWN_VARIABLES:
            env[KNOWN_VARIABLES[name]] = str(path)
    return env
