"""Attempts as jobs of Slurm: the supervisor is the batch job, on a node that shares our folder.

The folder stays the truth about what an attempt did; Slurm is asked whether it still lives. Its
silence decides nothing. The job's name carries the attempt's id, so that an agent which was
killed between sending a job and noting its number finds it again, and never sends it twice.
"""

import logging
import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runners import supervisor
from runners.attempts import LOST, AttemptFolder, Verdict
from runners.launch import LaunchRefusedError
from runners.launchers import slurm_commands
from runners.launchers.base import Lost
from runners.launchers.slurm_commands import Phase, SlurmAwayError, SlurmError, SlurmJob
from runners.messages import RunRequest
from runners.reasons import Reason
from runners.slurm_options import SlurmConfig
from runners.supervision import record
from runners.timing import scaled

TICKET = "slurm.json"
SCRIPT = "slurm.sh"
LOOK_SECONDS = scaled(10.0, least=0.5)
AWAY_SECONDS = scaled(30.0, least=0.5)
# How long a shared folder may take to show what a node wrote last.
SETTLE_SECONDS = scaled(30.0, least=2.0)
KILL_MARGIN_SECONDS = scaled(30.0, least=2.0)
END_MARGIN_SECONDS = 30.0  # the supervisor ends a job that long before Slurm would
LEAST_LIMIT_MINUTES = 2
# What Slurm tells the batch job of its share of the node, and the job has to know.
INHERIT = (
    "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "OMP_NUM_THREADS", "ROCR_VISIBLE_DEVICES",
    "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "TMPDIR",
)  # fmt: skip
REASONS = {
    "TIMEOUT": Reason.MAX_DURATION,
    "DEADLINE": Reason.MAX_DURATION,
    "OUT_OF_MEMORY": Reason.OOM_HOST,
    "NODE_FAIL": Reason.HOST_REBOOTED,
    "BOOT_FAIL": Reason.HOST_REBOOTED,
    "PREEMPTED": Reason.KILLED_EXTERNALLY,
    "CANCELLED": Reason.KILLED_EXTERNALLY,
    "REVOKED": Reason.KILLED_EXTERNALLY,
}

log = logging.getLogger(__name__)


class SlurmLauncher:
    """Hands attempts to Slurm and follows them there."""

    def __init__(
        self, config: SlurmConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._clock = clock
        self._next_look = 0.0
        self._jobs: dict[str, SlurmJob] | None = None  # by name; None: Slurm was never heard
        self._away = ""
        self._gone_since: dict[str, float] = {}
        self._killed: set[str] = set()

    # Looking

    def look(self, folders: Sequence[AttemptFolder]) -> None:
        """Ask Slurm when it is time to, and do what was left to do."""
        open_ones = [folder for folder in folders if _is_open(folder)]
        if not open_ones or self._clock() < self._next_look or not self._ask():
            return
        for folder in open_ones:
            try:
                self._tend(folder)
            except LaunchRefusedError as refusal:
                folder.settle(refusal.reason, str(refusal))
            except SlurmAwayError as error:
                self._note_away(error)
                return

    def _ask(self) -> bool:
        try:
            jobs = slurm_commands.queue()
        except SlurmError as error:
            self._note_away(error)
            return False
        self._jobs = {job.name: job for job in sorted(jobs, key=lambda job: int(job.job_id))
                      if job.job_id.isdigit()}  # fmt: skip
        self._away = ""
        self._next_look = self._clock() + LOOK_SECONDS
        return True

    def _note_away(self, error: SlurmError) -> None:
        if str(error) != self._away:
            log.warning("Slurm does not answer: %s", error)
        self._away = str(error)
        self._next_look = self._clock() + AWAY_SECONDS

    def _tend(self, folder: AttemptFolder) -> None:
        """Send, note or cancel a job, whichever its folder says is still to be done."""
        if _ticket(folder) is None:
            self._send(folder)
        elif (job := self._job(folder)) is None or job.phase is Phase.ENDED:
            self._gone_since.setdefault(folder.attempt_id, self._clock())
        elif (folder.path / record.STOP).exists():
            self.stop(folder)

    def _job(self, folder: AttemptFolder) -> SlurmJob | None:
        return (self._jobs or {}).get(job_name(folder))

    # Sending

    def adapt(self, document: Mapping[str, Any], request: RunRequest) -> dict[str, Any]:
        """Return the document with an end before Slurm's own, and with what the node adds.

        Raises:
            LaunchRefusedError: it is one member of several.
        """
        if request.gang is not None:
            raise LaunchRefusedError(
                Reason.VERSION_INCOMPATIBLE,
                "a Slurm host runs each job as one process on one node; choose another host "
                "for a job over several devices",
            )
        ends = self._limit_minutes(document) * 60 - END_MARGIN_SECONDS
        wanted = document.get("max_duration_seconds")
        shortest = ends if wanted is None else min(float(wanted), ends)
        return {
            **document,
            "max_duration_seconds": shortest,
            "inherit": [*document.get("inherit", ()), *INHERIT],
        }

    def _limit_minutes(self, document: Mapping[str, Any]) -> int:
        """Return the time that Slurm is asked for: the job's own limit with a margin, or ours."""
        wanted = document.get("max_duration_seconds")
        if wanted is None:
            return max(LEAST_LIMIT_MINUTES, self._config.time_limit_minutes)
        minutes = math.ceil((float(wanted) + END_MARGIN_SECONDS) / 60) + 1
        return max(LEAST_LIMIT_MINUTES, min(minutes, self._config.time_limit_minutes))

    def launch(self, folder: AttemptFolder) -> None:
        """Send the attempt to Slurm; while that does not answer, it is tried again.

        Raises:
            LaunchRefusedError: Slurm refuses it.
        """
        try:
            self._send(folder)
        except SlurmAwayError as error:
            self._note_away(error)

    def _send(self, folder: AttemptFolder) -> None:
        """Submit, unless a job of this name is there already: then it is ours, and is adopted."""
        name = job_name(folder)
        found = {job.name: job for job in slurm_commands.queue()}.get(name)
        if found is None and (folder.path / record.STOP).exists():
            self._gone_since.setdefault(folder.attempt_id, -math.inf)
            return
        job_id = found.job_id if found else self._submit(folder)
        record.write_json(folder.path / TICKET, {"job_id": job_id, "name": name})
        self._next_look = 0.0

    def _submit(self, folder: AttemptFolder) -> str:
        script = folder.path / SCRIPT
        script.write_text(render_script(folder))
        document = record.read_json(folder.path / record.LAUNCH) or {}
        options = [
            *self._config.argv(),
            f"--job-name={job_name(folder)}",
            f"--chdir={folder.path}",
            "--output=slurm.out",
            "--open-mode=append",
            "--export=HOME,LANG,LOGNAME,PATH,USER",
            "--no-requeue",  # an attempt runs once; another one is the server's to make
            "--nodes=1",
            "--ntasks=1",
            f"--time={self._limit_minutes(document)}",
        ]
        try:
            return slurm_commands.submit(options, script)
        except SlurmAwayError:
            raise
        except SlurmError as refusal:
            raise LaunchRefusedError(
                Reason.PREFLIGHT_FAILED,
                f'Slurm refused the job: {refusal}; see "slurm" in the host\'s config.json',
            ) from None

    # Verdicts

    def judge(self, folder: AttemptFolder) -> Verdict:
        """Return how an attempt stands: by its files, and by Slurm where they leave it open.

        This machine's boot means nothing for a job on another.
        """
        claim = folder.claim()
        verdict = folder.judge(claim.boot_id if claim else "")
        if verdict is Verdict.FINISHED and not folder.is_settled:
            return Verdict.RUNNING if self._is_active(folder) else verdict
        if verdict not in LOST or self._is_gone(folder):
            return verdict
        has_begun = (folder.path / record.SUPERVISOR).exists()
        return Verdict.RUNNING if has_begun or self._is_active(folder) else Verdict.WAITING

    def _is_active(self, folder: AttemptFolder) -> bool:
        job = self._job(folder)
        return job is not None and job.phase is Phase.ACTIVE

    def _is_gone(self, folder: AttemptFolder) -> bool:
        """Tell whether Slurm has not had the job for so long that no file of it is to come."""
        job = self._job(folder)
        if job is not None and job.phase is not Phase.ENDED:
            self._gone_since.pop(folder.attempt_id, None)
            return False
        since = self._gone_since.get(folder.attempt_id)
        return since is not None and self._clock() - since >= SETTLE_SECONDS

    def waits_for(self, folder: AttemptFolder) -> str:
        """Return why Slurm has not begun the job, in its own word."""
        if self._away:
            return "Slurm does not answer its host"
        ticket, job = _ticket(folder), self._job(folder)
        number = f" (job {ticket['job_id']})" if ticket else ""
        return f"Slurm{number}: {job.detail or 'not looked at yet'}" if job else f"Slurm{number}"

    def lost(self, folder: AttemptFolder, verdict: Verdict) -> Lost | None:
        """Return why an attempt ended that left no record, as Slurm tells it."""
        if verdict not in LOST:
            return None
        order = record.read_json(folder.path / record.STOP) or {}
        asked = Reason(order["reason"]) if order.get("reason") in set(Reason) else None
        ticket = _ticket(folder)
        if ticket is None:
            return Lost(asked or LOST[verdict], "it was never sent to Slurm")
        job = self._job(folder) or self._remembered(ticket["job_id"])
        if job is None:
            return Lost(asked or LOST[verdict], f"Slurm knows nothing of job {ticket['job_id']}")
        where = f" on {job.nodes}" if job.nodes else ""
        sentence = f"Slurm job {job.job_id} ended{where} as {job.state}"
        reason = REASONS.get(job.state, LOST[verdict])
        is_ours = asked is not None and reason in (Reason.KILLED_EXTERNALLY, LOST[verdict])
        return Lost(asked if is_ours and asked else reason, sentence)

    @staticmethod
    def _remembered(job_id: str) -> SlurmJob | None:
        try:
            return slurm_commands.ended(job_id)
        except SlurmError:
            return None

    # Stopping

    def stop(self, folder: AttemptFolder) -> None:
        """Cancel a job that waits; have the supervisor of one that runs obey its order.

        One that outlasts its grace by far is cancelled as a whole.
        """
        ticket, job = _ticket(folder), self._job(folder)
        if ticket is None:
            return
        try:
            if job is None or job.phase is Phase.WAITING:
                slurm_commands.run("scancel", "--state=PENDING", ticket["job_id"])
            if job is None or job.phase is Phase.ACTIVE:
                self._end(folder, ticket["job_id"])
            self._next_look = min(self._next_look, self._clock() + LOOK_SECONDS / 10)
        except SlurmAwayError as error:
            self._note_away(error)
        except SlurmError as refusal:  # it has ended meanwhile
            log.info("job %s: %s", ticket["job_id"], refusal)

    def _end(self, folder: AttemptFolder, job_id: str) -> None:
        order = folder.path / record.STOP
        grace = float((record.read_json(order) or {}).get("grace_seconds", 0.0))
        if time.time() - order.stat().st_mtime > grace + KILL_MARGIN_SECONDS:
            if folder.attempt_id not in self._killed:
                log.warning("job %s outlasted its grace and is cancelled", job_id)
            self._killed.add(folder.attempt_id)
            slurm_commands.run("scancel", job_id)
        else:
            slurm_commands.run("scancel", "--batch", "--signal=TERM", job_id)


def job_name(folder: AttemptFolder) -> str:
    """Return the name under which an attempt is found in Slurm."""
    return f"slipway-{folder.attempt_id}"


def render_script(folder: AttemptFolder) -> str:
    """Return the batch script: nothing in it comes from the job but the attempt's folder."""
    argv = [sys.executable, "-S", "-E", supervisor.__file__, str(folder.path), supervisor.STAY]
    return (
        "#!/bin/sh\n"
        'export OMP_NUM_THREADS="${SLURM_CPUS_ON_NODE:-1}"\n'
        f"exec {shlex.join(argv)}\n"
    )


def _ticket(folder: AttemptFolder) -> dict[str, Any] | None:
    return record.read_json(folder.path / TICKET)


def _is_open(folder: AttemptFolder) -> bool:
    """Tell whether an attempt was claimed and has not been told to its end."""
    claim = folder.claim()
    verdict = folder.judge(claim.boot_id) if claim else Verdict.DAMAGED
    is_live = verdict in LOST or verdict is Verdict.RUNNING
    return is_live or (verdict is Verdict.FINISHED and not folder.is_settled)
