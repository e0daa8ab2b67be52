"""Launches attempts as Slurm jobs: the supervisor is the batch job on a node sharing our folder.

A training that holds several of this host's slots runs on as many nodes, with one rank for each
GPU that the options request of a node, or as many as the training states.

How an attempt is tracked is the same for every scheduler (``runners.launchers.scheduler``).
"""

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runners.launchers import slurm_commands, slurm_end, slurm_nodes
from runners.launchers.attempts import AttemptFolder
from runners.launchers.scheduler import SchedulerLauncher
from runners.launchers.slurm_commands import SlurmJob
from runners.shared.reasons import Reason
from runners.shared.slurm import SlurmConfig
from runners.supervision import child, supervisor

SCRIPT = "slurm.sh"
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


class SlurmLauncher(SchedulerLauncher):
    """Submits attempts to Slurm and tracks them."""

    KIND = "slurm"
    TICKET = "slurm.json"
    REASONS = REASONS

    def __init__(
        self, config: SlurmConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(config, clock)
        self._config = config

    # Submitting

    def nodes_program(self, folder: Path, num_nodes: int, num_processes: int) -> list[str]:  # noqa: ARG002 - Slurm tells it
        """Return the program of the first node, which starts the others with ``srun``."""
        return [slurm_nodes.__name__, str(folder), str(num_processes)]

    def adapt(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the document, also with the program that says why Slurm ended the job."""
        explain_kill = [sys.executable, "-S", "-E", slurm_end.__file__]
        return {**super().adapt(document), "explain_kill": explain_kill}

    def inherited(self, document: Mapping[str, Any]) -> Sequence[str]:
        """Return the variables of the node that the job gets."""
        return (*INHERIT, *(OF_NODES if slurm_nodes.__name__ in document.get("argv", ()) else ()))

    def list_jobs(self) -> Mapping[str, SlurmJob]:
        """Return this user's jobs by name; of several of one name the newest."""
        jobs = [job for job in slurm_commands.queue() if job.job_id.isdigit()]
        return {job.name: job for job in sorted(jobs, key=lambda job: int(job.job_id))}

    def submit(self, folder: AttemptFolder) -> str:
        """Submit the batch script of an attempt."""
        script = folder.path / SCRIPT
        script.write_text(render_script(folder))
        document = child.read_json(folder.path / child.LAUNCH) or {}
        request = folder.request()
        options = [
            *self._config.argv(request.spec.scheduler_options if request else None),
            f"--job-name={self.job_name(folder)}",
            f"--chdir={folder.path}",
            "--output=slurm.out",
            "--open-mode=append",
            "--export=HOME,LANG,LOGNAME,PATH,USER",
            *_size(folder),
            f"--time={self.limit_minutes(document)}",
        ]
        return slurm_commands.submit(options, script)

    def ended_job(self, job_id: str) -> SlurmJob | None:
        """Return a job that squeue no longer lists."""
        return slurm_commands.ended_job(job_id)

    def cancel_waiting(self, job_id: str) -> None:
        """Cancel a pending job."""
        slurm_commands.run("scancel", "--state=PENDING", job_id)

    def interrupt(self, job_id: str, grace_seconds: float) -> None:  # noqa: ARG002 - the folder has it
        """Signal a running job's supervisor to stop."""
        slurm_commands.run("scancel", "--batch", "--signal=TERM", job_id)

    def kill(self, job_id: str) -> None:
        """Cancel a job as a whole."""
        slurm_commands.run("scancel", job_id)


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
