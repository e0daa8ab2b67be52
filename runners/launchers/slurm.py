"""Launches attempts as Slurm jobs: the supervisor is the batch job on a node sharing our folder.

A training that holds several of this host's slots runs on as many nodes, with one rank for each
GPU that the options request of a node, or as many as the training states.

The folder remains the record of the attempt; Slurm is only queried whether the job still
exists, and an unreachable Slurm changes no state. The job name contains the attempt id, so an
agent killed between submitting and storing the job id finds the job and does not resubmit it.
"""

import logging
import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runners.jobspec import JobSpec, TrainSpec
from runners.launchers import slurm_commands
from runners.launchers.attempts import LOST_REASONS, AttemptFolder, Verdict
from runners.launchers.launch import LaunchRefusedError, UnrecordedEnd
from runners.launchers.slurm_commands import Phase, SlurmError, SlurmJob, SlurmUnreachableError
from runners.shared.facts import SlurmConfig
from runners.shared.messages import RunRequest
from runners.shared.reasons import Reason
from runners.shared.timing import (
    SLURM_END_MARGIN_SECONDS,
    SLURM_KILL_MARGIN_SECONDS,
    SLURM_SETTLE_SECONDS,
    STOP_GRACE_SECONDS,
    scale_duration,
)
from runners.supervision import child, supervisor

NODES = "runners.launchers.slurm_nodes"
TICKET = "slurm.json"
SCRIPT = "slurm.sh"
POLL_SECONDS = scale_duration(10.0, least=0.5)
AWAY_SECONDS = scale_duration(30.0, least=0.5)
LEAST_LIMIT_MINUTES = 2
# Variables of the batch job that the job inherits: its share of the node.
INHERIT = (
    "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS",
    "ROCR_VISIBLE_DEVICES", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "TMPDIR",
)  # fmt: skip
# With which a training over several ranks finds its nodes and starts processes there.
OF_NODES = (
    "SLURM_CONF", "SLURM_CPUS_ON_NODE", "SLURM_CPUS_PER_TASK", "SLURM_NNODES",
    "SLURM_RESTART_COUNT",
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
    """Submits attempts to Slurm and tracks them."""

    def __init__(
        self, config: SlurmConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._clock = clock
        self._next_poll = 0.0
        self._jobs: dict[str, SlurmJob] | None = None  # by name; None: Slurm has not answered yet
        self._unreachable_reason = ""
        self._gone_since: dict[str, float] = {}
        self._killed: set[str] = set()

    # Polling

    def refresh(self, folders: Sequence[AttemptFolder]) -> None:
        """Query Slurm if due, and perform pending submissions and cancellations."""
        open_ones = [folder for folder in folders if _is_open(folder)]
        if not open_ones or self._clock() < self._next_poll or not self._query():
            return
        for folder in open_ones:
            try:
                if _ticket(folder) is None:
                    self._send(folder)
                elif (job := self._job(folder)) is None or job.phase is Phase.ENDED:
                    self._gone_since.setdefault(folder.attempt_id, self._clock())
                elif (folder.path / child.STOP).exists():
                    self.stop(folder)
            except LaunchRefusedError as refusal:
                folder.settle(refusal.reason, str(refusal))
            except SlurmUnreachableError as error:
                self._record_unreachable(error)
                return

    def _query(self) -> bool:
        try:
            jobs = slurm_commands.queue()
        except SlurmError as error:
            self._record_unreachable(error)
            return False
        self._jobs = {job.name: job for job in sorted(jobs, key=lambda job: int(job.job_id))
                      if job.job_id.isdigit()}  # fmt: skip
        self._unreachable_reason = ""
        self._next_poll = self._clock() + POLL_SECONDS
        return True

    def _record_unreachable(self, error: SlurmError) -> None:
        if str(error) != self._unreachable_reason:
            log.warning("Slurm does not answer: %s", error)
        self._unreachable_reason = str(error)
        self._next_poll = self._clock() + AWAY_SECONDS

    def _job(self, folder: AttemptFolder) -> SlurmJob | None:
        return (self._jobs or {}).get(job_name(folder))

    # Submitting

    def command(
        self, request: RunRequest, spec: JobSpec, argv: list[str], folder: Path
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command, a training's over several ranks with the nodes' launcher before it.

        Raises:
            LaunchRefusedError: the attempt is part of a gang of hosts, or no training.
        """
        if request.gang is None:
            return argv, {}
        if request.gang.num_nodes > 1 or not isinstance(spec, TrainSpec):
            raise LaunchRefusedError(
                Reason.VERSION_INCOMPATIBLE,
                "a Slurm host takes a training over several nodes alone, as one job of several "
                "of its slots; choose this host alone for a training, or another one",
            )
        python, *program = argv
        ranks = str(self._config.gpus_per_node or request.gang.num_processes)
        return [python, "-m", NODES, str(folder), ranks, *program], {}

    def adapt(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the document with a time limit below Slurm's and the variables of the node."""
        latest_end = self._limit_minutes(document) * 60 - SLURM_END_MARGIN_SECONDS
        requested = document.get("max_duration_seconds")
        nodes = OF_NODES if NODES in document.get("argv", ()) else ()
        shortest = latest_end if requested is None else min(float(requested), latest_end)
        return {
            **document,
            "max_duration_seconds": shortest,
            "inherit": [*document.get("inherit", ()), *INHERIT, *nodes],
        }

    def _limit_minutes(self, document: Mapping[str, Any]) -> int:
        """Return the Slurm time limit: the job's limit plus a margin, or the configured one."""
        requested = document.get("max_duration_seconds")
        if requested is None:
            return max(LEAST_LIMIT_MINUTES, self._config.time_limit_minutes)
        minutes = math.ceil((float(requested) + SLURM_END_MARGIN_SECONDS) / 60) + 1
        return max(LEAST_LIMIT_MINUTES, min(minutes, self._config.time_limit_minutes))

    def launch(self, folder: AttemptFolder) -> None:
        """Submit the attempt to Slurm; retried while Slurm is unreachable.

        Raises:
            LaunchRefusedError: Slurm rejects the job.
        """
        try:
            self._send(folder)
        except SlurmUnreachableError as error:
            self._record_unreachable(error)

    def _send(self, folder: AttemptFolder) -> None:
        """Submit the job, or adopt the existing job of this name."""
        name = job_name(folder)
        existing = {job.name: job for job in slurm_commands.queue()}.get(name)
        if existing is None and (folder.path / child.STOP).exists():
            self._gone_since.setdefault(folder.attempt_id, -math.inf)
            return
        job_id = existing.job_id if existing else self._submit(folder)
        child.write_json(folder.path / TICKET, {"job_id": job_id, "name": name})
        self._next_poll = 0.0

    def _submit(self, folder: AttemptFolder) -> str:
        script = folder.path / SCRIPT
        script.write_text(render_script(folder))
        document = child.read_json(folder.path / child.LAUNCH) or {}
        options = [
            *self._config.argv(),
            f"--job-name={job_name(folder)}",
            f"--chdir={folder.path}",
            "--output=slurm.out",
            "--open-mode=append",
            "--export=HOME,LANG,LOGNAME,PATH,USER",
            *_size(folder),
            f"--time={self._limit_minutes(document)}",
        ]
        try:
            return slurm_commands.submit(options, script)
        except SlurmUnreachableError:
            raise
        except SlurmError as refusal:
            raise LaunchRefusedError(
                Reason.PREFLIGHT_FAILED,
                f'Slurm refused the job: {refusal}; see "slurm" in the host\'s config.json',
            ) from None

    # Verdicts

    def verdict_of(self, folder: AttemptFolder) -> Verdict:
        """Return an attempt's state from its files and, if they do not decide, from Slurm.

        This machine's boot id does not apply: the job runs on another machine.
        """
        claim = folder.claim()
        verdict = folder.verdict(claim.boot_id if claim else "")
        if verdict is Verdict.FINISHED and not folder.is_settled:
            return Verdict.RUNNING if self._is_active(folder) else verdict
        if verdict not in LOST_REASONS or self._is_gone(folder):
            return verdict
        has_begun = (folder.path / child.SUPERVISOR).exists()
        return Verdict.RUNNING if has_begun or self._is_active(folder) else Verdict.WAITING

    def _is_active(self, folder: AttemptFolder) -> bool:
        job = self._job(folder)
        return job is not None and job.phase is Phase.ACTIVE

    def _is_gone(self, folder: AttemptFolder) -> bool:
        """Return whether the job left Slurm so long ago that no more files will appear."""
        job = self._job(folder)
        if job is not None and job.phase is not Phase.ENDED:
            self._gone_since.pop(folder.attempt_id, None)
            return False
        since = self._gone_since.get(folder.attempt_id)
        return since is not None and self._clock() - since >= SLURM_SETTLE_SECONDS

    def waits_for(self, folder: AttemptFolder) -> str:
        """Return Slurm's reason why the job is pending."""
        if self._unreachable_reason:
            return "Slurm does not answer its host"
        ticket, job = _ticket(folder), self._job(folder)
        number = f" (job {ticket['job_id']})" if ticket else ""
        return f"Slurm{number}: {job.detail or 'not checked yet'}" if job else f"Slurm{number}"

    def unrecorded_end(self, folder: AttemptFolder, verdict: Verdict) -> UnrecordedEnd | None:
        """Return Slurm's reason for an end without an exit record."""
        if verdict not in LOST_REASONS:
            return None
        order = child.read_json(folder.path / child.STOP) or {}
        ordered_reason = Reason(order["reason"]) if order.get("reason") in set(Reason) else None
        ticket = _ticket(folder)
        if ticket is None:
            return UnrecordedEnd(
                ordered_reason or LOST_REASONS[verdict], "it was never sent to Slurm"
            )
        job = self._job(folder) or self._ended_job(ticket["job_id"])
        if job is None:
            return UnrecordedEnd(
                ordered_reason or LOST_REASONS[verdict],
                f"Slurm has no record of job {ticket['job_id']}",
            )
        where = f" on {job.nodes}" if job.nodes else ""
        sentence = f"Slurm job {job.job_id} ended{where} as {job.state}"
        reason = REASONS.get(job.state, LOST_REASONS[verdict])
        is_ours = ordered_reason is not None and reason in (
            Reason.KILLED_EXTERNALLY,
            LOST_REASONS[verdict],
        )
        return UnrecordedEnd(ordered_reason if is_ours and ordered_reason else reason, sentence)

    @staticmethod
    def _ended_job(job_id: str) -> SlurmJob | None:
        try:
            return slurm_commands.ended_job(job_id)
        except SlurmError:
            return None

    # Stopping

    def stop(self, folder: AttemptFolder) -> None:
        """Cancel a pending job, or signal a running job's supervisor to stop.

        A job that outlasts its grace by ``SLURM_KILL_MARGIN_SECONDS`` is cancelled as a whole.
        """
        ticket, job = _ticket(folder), self._job(folder)
        if ticket is None:
            return
        try:
            if job is None or job.phase is Phase.WAITING:
                slurm_commands.run("scancel", "--state=PENDING", ticket["job_id"])
            if job is None or job.phase is Phase.ACTIVE:
                self._end(folder, ticket["job_id"])
            self._next_poll = min(self._next_poll, self._clock() + POLL_SECONDS / 10)
        except SlurmUnreachableError as error:
            self._record_unreachable(error)
        except SlurmError as refusal:  # the job has already ended
            log.info("job %s: %s", ticket["job_id"], refusal)

    def _end(self, folder: AttemptFolder, job_id: str) -> None:
        order = folder.path / child.STOP
        grace = float((child.read_json(order) or {}).get("grace_seconds", STOP_GRACE_SECONDS))
        if time.time() - order.stat().st_mtime > grace + SLURM_KILL_MARGIN_SECONDS:
            if folder.attempt_id not in self._killed:
                log.warning("job %s outlasted its grace and is cancelled", job_id)
            self._killed.add(folder.attempt_id)
            slurm_commands.run("scancel", job_id)
        else:
            slurm_commands.run("scancel", "--batch", "--signal=TERM", job_id)


def job_name(folder: AttemptFolder) -> str:
    """Return an attempt's Slurm job name."""
    return f"slipway-{folder.attempt_id}"


def _size(folder: AttemptFolder) -> list[str]:
    """Return the options of an attempt's nodes: one for each slot that a training of ranks holds.

    Slurm requeues a job of several nodes when one fails. Of a single node the attempt runs once:
    retries are the server's decision.
    """
    request = folder.request()
    nodes = len(request.devices) if request and request.gang else 1
    again = "--requeue" if nodes > 1 else "--no-requeue"
    return [again, f"--nodes={max(1, nodes)}", "--ntasks-per-node=1"]


def render_script(folder: AttemptFolder) -> str:
    """Return the batch script; its only job-specific part is the attempt's folder."""
    argv = [sys.executable, "-S", "-E", supervisor.__file__, str(folder.path), supervisor.STAY]
    return (
        "#!/bin/sh\n"
        'export OMP_NUM_THREADS="${SLURM_CPUS_ON_NODE:-1}"\n'
        f"exec {shlex.join(argv)}\n"
    )


def _ticket(folder: AttemptFolder) -> dict[str, Any] | None:
    return child.read_json(folder.path / TICKET)


def _is_open(folder: AttemptFolder) -> bool:
    """Return whether an attempt was claimed and is not settled yet."""
    claim = folder.claim()
    verdict = folder.verdict(claim.boot_id) if claim else Verdict.DAMAGED
    is_live = verdict in LOST_REASONS or verdict is Verdict.RUNNING
    return is_live or (verdict is Verdict.FINISHED and not folder.is_settled)
