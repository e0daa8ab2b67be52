"""A real Slurm in a folder of its own, as root: munged, slurmctld and a slurmd for each node."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

PROGRAMS = ("munged", "sbatch", "slurmctld", "slurmd")
CONFIG = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n/spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n/slurmd.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmctldPort={controller_port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/linux
ReturnToService=2
KillWait=5
SlurmdTimeout=10
MinJobAge={remember_seconds}
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
PartitionName=closed Nodes={names} MaxTime=60 State=DOWN
PartitionName=urgent Nodes={names} MaxNodes=1 PriorityTier=9 State=UP
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} "
    "RealMemory=4000 State=UNKNOWN"
)
CPUS = 4  # whatever the machine has
PATIENCE_SECONDS = 600.0


class Cluster:
    """One controller and its nodes; each may be killed, the controller started again."""

    def __init__(self, folder: Path, nodes: tuple[str, ...] = ()) -> None:
        """Name the nodes; without names there is one, with the name of this machine."""
        self.folder = folder
        self.config = folder / "slurm.conf"
        self.host = socket.gethostname()
        self.nodes = nodes or (self.host,)
        self._munged: subprocess.Popen[bytes] | None = None

    @staticmethod
    def why_not() -> str:
        """Return why no cluster can run here, or "" when one can."""
        missing = [name for name in PROGRAMS if shutil.which(name) is None]
        if missing:
            return f"not installed: {', '.join(missing)} (Debian: slurm-wlm, munge)"
        return "" if os.geteuid() == 0 else "slurmd starts jobs as their users: it needs root"

    def start(self) -> None:
        for name in ("state", *self.nodes):
            (self.folder / name).mkdir()
        nodes = [
            NODE.format(name=name, host=self.host, port=_free_port(), cpus=CPUS)
            for name in self.nodes
        ]
        self.config.write_text(
            CONFIG.format(
                host=self.host,
                folder=self.folder,
                controller_port=_free_port(),
                nodes="\n".join(nodes),
                names=",".join(self.nodes),
                remember_seconds=600,
            )
        )
        self._start_munge()
        self.start_controller()
        for name in self.nodes:
            self.start_node(name)
        self.wait_for(lambda: self.num_idle() == len(self.nodes))

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        files = [f"--{name}={self.folder}/munge.{end}" for name, end in (
            ("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"),
            ("log-file", "log"), ("seed-file", "seed"))]  # fmt: skip
        self._munged = subprocess.Popen(["munged", "--foreground", "--force", *files])
        self.wait_for((self.folder / "munge.socket").exists)

    def start_controller(self) -> None:
        self._run("slurmctld")
        self.wait_for(lambda: "UP" in self._run("scontrol", "ping"))

    def has_saved(self, attempt: Path) -> bool:
        """Tell whether the controller would know the job of an attempt after it was killed.

        One that forgot it gives its number to the next, which the node refuses to run.
        """
        saved = self.folder / "state/job_state"
        sent = (attempt / "slurm.json").stat().st_mtime
        return saved.exists() and saved.stat().st_mtime > sent

    def num_idle(self) -> int:
        """Return how many nodes answer and run nothing."""
        return self._run("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split().count("idle")

    def kill_controller(self) -> None:
        self._kill("slurmctld")

    def kill_node(self, name: str) -> None:
        """Kill a node as a loss of power does: its slurmd and all processes of its jobs."""
        self._kill(f"{name}/slurmd")
        steps = {
            ancestor.pid: ancestor
            for process in psutil.process_iter()
            if _node_of(process) == name
            for ancestor in process.parents()
            if ancestor.name().startswith("slurmstepd")
        }
        for step in steps.values():
            for process in (step, *step.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def start_node(self, name: str) -> None:
        self._run("slurmd", "-N", name)

    def stop(self) -> None:
        if self.config.exists():
            self._run("scancel", f"--user={os.getuid()}")
            self.wait_for(lambda: not self._run("squeue", "-h"))  # else its processes stay
        for name in (*(f"{node}/slurmd" for node in self.nodes), "slurmctld"):
            self._kill(name)
        if self._munged:
            self._munged.kill()
            self._munged.wait()

    def states(self) -> dict[str, str]:
        """Return the state of every job by its name."""
        lines = self._run("squeue", "-h", "--states=all", "-o", "%j %T").splitlines()
        return dict(line.split() for line in lines)

    def run(self, *argv: str) -> str:
        return self._run(*argv)

    def wait_for(self, condition: object, seconds: float = PATIENCE_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{condition}; {self._tail()}")
            time.sleep(0.1)

    def _run(self, *argv: str) -> str:
        env = os.environ | {"SLURM_CONF": str(self.config)}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        return done.stdout

    def _kill(self, name: str) -> None:
        pid_file = self.folder / f"{name}.pid"
        if not pid_file.exists():
            return
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGKILL)
        pid_file.unlink()
        self.wait_for(lambda: not _is_alive(pid))

    def _tail(self) -> str:
        logs = [self.folder / "slurmctld.log", *self.folder.glob("*/slurmd.log")]
        return "\n".join(path.read_text()[-1500:] for path in logs if path.exists())


def _node_of(process: psutil.Process) -> str:
    """Return the node that a process of a Slurm job has in its environment."""
    with suppress(psutil.Error):
        return process.environ().get("SLURMD_NODENAME", "")
    return ""


def _is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
