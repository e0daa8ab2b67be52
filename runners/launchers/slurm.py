"""Launches attempts as Slurm jobs: the supervisor is the batch job on a node sharing our folder.

A training that holds several of this host's slots runs on as many nodes, with one rank for each
GPU that the options request of a node, or as many as the training states.

Attempts that are sent in one round and ask for the same, such as a sweep's, are one array.

How an attempt is tracked is the same for every scheduler (``runners.launchers.scheduler``).
"""

import logging
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runners.launchers import slurm_arrays, slurm_commands, slurm_end, slurm_nodes
from runners.launchers.attempts import AttemptFolder
from runners.launchers.scheduler import SchedulerLauncher
from runners.launchers.slurm_arrays import OMP, key_of, place_of
from runners.launchers.slurm_commands import SlurmError, SlurmJob, SlurmUnreachableError
from runners.shared.reasons import Reason
from runners.shared.slurm import SlurmConfig
from runners.shared.timing import scale_duration
from runners.supervision import child, supervisor

log = logging.getLogger(__name__)

SCRIPT = "slurm.sh"
GATHER_SECONDS = scale_duration(2.0, least=1.0)  # after an attempt for the next one like it
MOST_GATHER_SECONDS = 10.0  # of the first one's
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
        self._gathers_since: float | None = None  # the first attempt that waits to be sent

    # Submitting

    def nodes_program(self, folder: Path, num_nodes: int, num_processes: int) -> list[str]:  # noqa: ARG002 - Slurm tells it
        """Return the program of the first node, which starts the others with ``srun``."""
        return [slurm_nodes.__name__, str(folder), str(num_processes)]

    def adapt(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the document, also with whether Slurm may run the job again."""
        return super().adapt(document) | {"may_run_again": _has_nodes(document)}

    def explain_kill(self) -> list[str]:
        """Return the program that asks Slurm on the job's node."""
        return [sys.executable, "-S", "-E", slurm_end.__file__]

    def inherited(self, document: Mapping[str, Any]) -> Sequence[str]:
        """Return the variables of the node that the job gets."""
        return (*INHERIT, *(OF_NODES if _has_nodes(document) else ()))

    def list_jobs(self) -> Mapping[str, SlurmJob]:
        """Return this user's jobs and tasks of arrays by name; of one name the newest."""
        found: dict[str, SlurmJob] = {}
        numbered = [(job.job_id.partition("_"), job) for job in slurm_commands.queue()]
        jobs = [
            (int(number), task, job) for (number, _, task), job in numbered if number.isdigit()
        ]
        for _number, task, job in sorted(jobs, key=lambda each: each[:2]):
            found[key_of(job.name, task) if task else job.name] = job
        return found

    @staticmethod
    def job_name(folder: AttemptFolder) -> str:
        """Return the name of an attempt's job, or of its task of an array."""
        place = place_of(folder)
        return place.key if place else SchedulerLauncher.job_name(folder)

    def launch(self, folder: AttemptFolder) -> None:
        """Submit a training over nodes; the rest waits for its like, for ``send_together``.

        Checks before a launch take each attempt of a sweep their own time: they come one by one.

        Raises:
            LaunchRefusedError: Slurm rejects the job.
        """
        if _num_nodes(folder) > 1:
            super().launch(folder)
            self._next_poll = 0.0
            return
        now = self._clock()
        if self._gathers_since is None:
            self._gathers_since = now
        self._next_poll = min(now + GATHER_SECONDS, self._gathers_since + MOST_GATHER_SECONDS)

    def send_together(self, folders: Sequence[AttemptFolder]) -> None:
        """Submit attempts that ask for the same as one array; one alone is a plain job.

        What Slurm refuses as an array is then sent one by one, so that a limit ends no more
        attempts than it must.
        """
        self._gathers_since = None
        alike: dict[tuple[str, ...], list[AttemptFolder]] = defaultdict(list)
        for folder in folders:
            is_stopped = (folder.path / child.STOP).exists()
            if _num_nodes(folder) > 1 or is_stopped or self._job(folder) is not None:
                continue
            (folder.path / slurm_arrays.PLACE).unlink(missing_ok=True)  # that was never sent
            alike[tuple(self._options(folder))].append(folder)
        for options, group in alike.items():
            if len(group) > 1:
                self._send_array(options, group)

    def _send_array(self, options: Sequence[str], group: Sequence[AttemptFolder]) -> None:
        first, name = group[0], f"{slurm_arrays.NAME}{group[0].attempt_id}"
        for index, folder in enumerate(group):
            child.write_json(folder.path / slurm_arrays.PLACE, {"name": name, "task": index})
        script = first.path / slurm_arrays.SCRIPT
        script.write_text(slurm_arrays.render_script(group))
        most = f"%{self._config.array_limit}" if self._config.array_limit else ""
        tasks = f"--array=0-{len(group) - 1}{most}"
        own = (f"--job-name={name}", f"--chdir={first.path.parent}", "--output=/dev/null", tasks)
        try:
            number = slurm_commands.submit([*options, *own], script)
        except SlurmUnreachableError:
            raise
        except SlurmError as refusal:  # such as of a cluster without arrays: each goes alone
            log.info("Slurm refused an array of %d: %s", len(group), refusal)
            for folder in group:
                (folder.path / slurm_arrays.PLACE).unlink()
            return
        for index, folder in enumerate(group):
            ticket = {"job_id": f"{number}_{index}", "name": self.job_name(folder)}
            child.write_json(folder.path / self.TICKET, ticket)
        self._next_poll = 0.0

    def submit(self, folder: AttemptFolder) -> str:
        """Submit the batch script of an attempt."""
        script = folder.path / SCRIPT
        script.write_text(render_script(folder))
        options = [
            *self._options(folder),
            f"--job-name={self.job_name(folder)}",
            f"--chdir={folder.path}",
            "--output=slurm.out",
        ]
        return slurm_commands.submit(options, script)

    def _options(self, folder: AttemptFolder) -> list[str]:
        """Return what an attempt asks of Slurm: attempts with the same may be one array."""
        document = child.read_json(folder.path / child.LAUNCH) or {}
        request = folder.request()
        return [
            *self._config.argv(request.spec.scheduler_options if request else None),
            "--open-mode=append",
            "--export=HOME,LANG,LOGNAME,PATH,USER",
            *_size(folder),
            f"--time={self.limit_minutes(document)}",
        ]

    def ended_job(self, job_id: str) -> SlurmJob | None:
        """Return a job that squeue no longer lists."""
        return slurm_commands.ended_job(job_id)

    def cancel_waiting(self, job_id: str) -> None:
        """Cancel a pending job.

        By a filter, scancel 22.05 would cancel all tasks of an array that wait: they share a
        record. A task that has begun meanwhile gets SIGTERM, and finds its stop order.
        """
        only = [] if "_" in job_id else ["--state=PENDING"]
        slurm_commands.run("scancel", *only, job_id)

    def interrupt(self, job_id: str, grace_seconds: float) -> None:  # noqa: ARG002 - the folder has it
        """Signal a running job's supervisor to stop."""
        slurm_commands.run("scancel", "--batch", "--signal=TERM", job_id)

    def kill(self, job_id: str) -> None:
        """Cancel a job as a whole."""
        slurm_commands.run("scancel", job_id)


def _has_nodes(document: Mapping[str, Any]) -> bool:
    """Return whether the command is that of a training over nodes, which Slurm may requeue."""
    return slurm_nodes.__name__ in document.get("argv", ())


def _size(folder: AttemptFolder) -> list[str]:
    """Return the options of an attempt's nodes: one for each slot that a training of ranks holds.

    Slurm requeues a job of several nodes when one fails. Of a single node the attempt runs once:
    retries are the server's decision.
    """
    nodes = _num_nodes(folder)
    again = "--requeue" if nodes > 1 else "--no-requeue"
    return [again, f"--nodes={nodes}", "--ntasks-per-node=1"]


def _num_nodes(folder: AttemptFolder) -> int:
    request = folder.request()
    return max(1, len(request.devices)) if request and request.gang else 1


def render_script(folder: AttemptFolder) -> str:
    """Return the batch script; its only job-specific part is the attempt's folder."""
    argv = [sys.executable, "-S", "-E", supervisor.__file__, str(folder.path), supervisor.STAY]
    return f"#!/bin/sh\n{OMP}exec {shlex.join(argv)}\n"
