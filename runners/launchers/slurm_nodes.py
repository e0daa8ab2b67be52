"""Runs a training's ranks on all nodes of a Slurm job: ``... FOLDER RANKS_PER_NODE PROGRAM...``.

The batch job's supervisor starts this module on the first node. It starts the same module on
the other nodes with one ``srun``, and torchrun on each node. The allocation names the nodes; the
first is the rendezvous, on a port computed from the job's id and restart count, and every node
learns its own address from its route to the first (``runners.launchers.nodes``).
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from runners.launchers.nodes import become_torchrun, joined, ranks_environment, torchrun_of
from runners.launchers.slurm_commands import SlurmError, node_address, node_names, requeue, run
from runners.shared.messages import Gang
from runners.shared.timing import scale_duration
from runners.supervision import child

JOIN = "--join"  # on the other nodes: the rendezvous follows
FIRST_PORT, NUM_PORTS = 10_000, 20_000  # below the ports that Linux gives to connections
POLL_SECONDS = 0.2
END_SECONDS = scale_duration(30.0, least=5.0)  # for the other nodes to end after the first
LOST = "RANK_LOST"


class Allocation(NamedTuple):
    """What Slurm says of this job in its environment."""

    job_id: str
    num_nodes: int
    node_list: str
    restarts: int

    @classmethod
    def of(cls, env: Mapping[str, str]) -> "Allocation":
        """Return the allocation of a batch job's environment."""
        return cls(
            env["SLURM_JOB_ID"],
            int(env["SLURM_NNODES"]),
            env["SLURM_JOB_NODELIST"],
            int(env.get("SLURM_RESTART_COUNT", "0")),
        )

    @property
    def title(self) -> str:
        """Return the job's number, and how often Slurm has restarted it."""
        again = f", restart {self.restarts}," if self.restarts else ""
        return f"Slurm job {self.job_id}{again}"

    @property
    def port(self) -> int:
        """Return the rendezvous port: another one for each job and for each of its restarts."""
        return FIRST_PORT + (int(self.job_id) * 7 + self.restarts) % NUM_PORTS

    def gang(self, master_address: str, num_processes: int) -> Gang:
        """Return the first node's part of the job."""
        return Gang(
            node_rank=0,
            num_nodes=self.num_nodes,
            num_processes=num_processes,
            master_address=master_address,
            master_port=self.port,
            own_address=master_address,
            rendezvous_id=f"slurm-{self.job_id}-{self.restarts}",
        )


def srun_argv(allocation: Allocation, cpus_per_task: str, command: Sequence[str]) -> list[str]:
    """Return the command that runs ``command`` once on each node but the first."""
    others = allocation.num_nodes - 1
    return [
        "srun",
        f"--nodes={others}",
        f"--ntasks={others}",
        "--ntasks-per-node=1",
        "--relative=1",
        *([f"--cpus-per-task={cpus_per_task}"] if cpus_per_task else []),
        "--export=ALL",
        "--kill-on-bad-exit=1",
        "--mpi=none",
        *command,
    ]


def _join(folder: Path, first: Gang, program: Sequence[str]) -> None:
    """Become this node's torchrun: srun's first task is the second node."""
    gang = joined(first, int(os.environ["SLURM_NODEID"]) + 1)
    become_torchrun(folder, gang, program, _num_cpus())


def _num_cpus() -> int:
    """Return the CPUs that Slurm gave this node's part of the job."""
    return int(os.environ.get("SLURM_CPUS_ON_NODE", "1"))


class Nodes:
    """The processes of a job on the first node: its torchrun, and the srun of the others."""

    def __init__(self, folder: Path, num_processes: int, program: Sequence[str]) -> None:
        self.allocation = Allocation.of(os.environ)
        self._folder = folder
        self._is_stopping = False
        signal.signal(signal.SIGTERM, self._on_sigterm)  # torchrun and srun get it themselves
        names = node_names(self.allocation.node_list)
        _report(f"{self.allocation.title} runs on {', '.join(names)}")
        address = node_address(names[0])
        gang = self.allocation.gang(address, num_processes)
        again = [sys.executable, "-m", __spec__.name, str(folder), str(num_processes)]
        cpus = os.environ.get("SLURM_CPUS_PER_TASK", "")
        others = [*again, JOIN, gang.model_dump_json(), *program]
        self._srun: subprocess.Popen[bytes] | None = None
        if self.allocation.num_nodes > 1:
            self._srun = _start(srun_argv(self.allocation, cpus, others), os.environ)
        environment = ranks_environment(gang, _num_cpus())
        self._torchrun = _start(torchrun_of(folder, gang, program), environment)

    def _on_sigterm(self, *_: object) -> None:
        self._is_stopping = True

    def run(self) -> int:
        """Wait for all nodes and return the exit code; a job that lost a node is requeued."""
        code = self._wait()
        if code and not self._is_stopping and (lost := self._lost_nodes()):
            self._requeue(lost)
        return code

    def _wait(self) -> int:
        while (code := self._torchrun.poll()) is None:
            if self._srun and self._srun.poll():  # torchrun would wait for the rank timeout
                self._torchrun.terminate()
                self._torchrun.wait()
                return self._srun.returncode
            time.sleep(POLL_SECONDS)
        if self._srun is None:
            return code
        if code:
            self._srun.terminate()
        with suppress(subprocess.TimeoutExpired):
            return code or self._srun.wait(END_SECONDS)
        self._srun.kill()
        return code

    def _lost_nodes(self) -> str:
        """Return Slurm's words if it cannot start a process on the other nodes, else ""."""
        if self._srun is None:
            return ""
        argv = srun_argv(self.allocation, "", ["true"])
        try:
            run(argv[0], f"--jobid={self.allocation.job_id}", "--overlap", *argv[1:])
        except SlurmError as error:
            return str(error)
        return ""

    def _requeue(self, lost: str) -> None:
        """Give the job back to Slurm, which ends this run; return if Slurm refuses.

        The supervisor then leaves no exit record: the next run goes on in the same folder.
        """
        job_id, marker = self.allocation.job_id, self._folder / child.REQUEUED
        _report(f"a node of Slurm job {job_id} was lost ({lost}): the job is requeued")
        child.write_json(marker, {"job_id": job_id, "restarts": self.allocation.restarts})
        try:
            requeue(job_id)
        except SlurmError as error:
            marker.unlink()
            _report(f"{LOST}: Slurm does not requeue the job: {error}")


def _start(argv: Sequence[str], env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    me = os.getpid()
    events = [int(env[child.EVENT_FD])] if child.EVENT_FD in env else []
    return subprocess.Popen(
        argv,
        env=env,
        stdin=subprocess.DEVNULL,
        pass_fds=events,
        preexec_fn=lambda: child.die_with(me),  # noqa: PLW1509 - this process has one thread
    )


def _report(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main(arguments: Sequence[str]) -> int:
    """Run the first node's part, or with ``--join GANG`` another node's."""
    folder, num_processes, *program = arguments
    if program[0] == JOIN:
        _join(Path(folder), Gang.model_validate_json(program[1]), program[2:])
    return Nodes(Path(folder), int(num_processes), program).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
