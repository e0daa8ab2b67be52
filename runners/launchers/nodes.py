"""A training's ranks on one node of several that a scheduler gave to one job.

All nodes share the attempt's folder: the first node's lead rank writes it, and the events of the
others' lead ranks are dropped.
"""

import errno
import os
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from pydantic import BaseModel, ConfigDict

from runners.jobspec import TrainSpec
from runners.launchers.attempts import AttemptFolder
from runners.launchers.launch import gang_env, torchrun_argv
from runners.shared.messages import GANG_VARIABLE, Gang
from runners.supervision import child

RENDEZVOUS = "rendezvous.json"
POLL_SECONDS = 1.0
# Variables of a node that its processes inherit where the scheduler sets them: its devices.
OF_NODE = (
    "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES", "LD_LIBRARY_PATH",
    "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "ROCR_VISIBLE_DEVICES",
)  # fmt: skip


class Rendezvous(BaseModel):
    """What the first node tells the others through the attempt's folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gang: Gang
    program: tuple[str, ...]
    environment: dict[str, str]  # of the job; each node keeps its own devices

    @classmethod
    def write(
        cls, folder: Path, gang: Gang, program: Sequence[str], own: Collection[str]
    ) -> "Rendezvous":
        """Write it for the other nodes, without the variables that are each node's own."""
        kept = {name: value for name, value in os.environ.items() if name not in own}
        told = cls(gang=gang, program=tuple(program), environment=kept)
        child.write_json(folder / RENDEZVOUS, told.model_dump(mode="json"))
        return told

    @classmethod
    def wait(cls, folder: Path, rendezvous_id: str = "") -> "Rendezvous":
        """Return what the first node wrote, with this id if stated; end with the attempt."""
        attempt = AttemptFolder(folder)
        while True:
            written = child.read_json(folder / RENDEZVOUS)
            told = cls.model_validate(written) if written else None
            if told and rendezvous_id in ("", told.gang.rendezvous_id):
                return told
            if attempt.exit_record():
                sys.exit(f"the attempt in {folder} ended before its ranks started")
            time.sleep(POLL_SECONDS)


def num_cpus(environment: Mapping[str, str]) -> int:
    """Return the CPUs of this node's part, which the scheduler states as a number of threads."""
    return int(environment.get("OMP_NUM_THREADS", "1"))


def free_port(address: str, ports: range, start: int) -> int:
    """Return the first port from ``start`` on, round the range, on which nothing listens here.

    Raises:
        OSError: the last one is taken, too, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for offset in range(len(ports)):
        port = ports[(start + offset) % len(ports)]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE or offset + 1 == len(ports):
                    raise
            else:
                return port
    raise AssertionError("the range is empty")


def route_to(address: str, port: int) -> str:
    """Return the address of this node from which it reaches another one; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])


def joined(first: Gang, node_rank: int) -> Gang:
    """Return the part of another node than the first."""
    own = route_to(first.master_address, first.master_port)
    return first.model_copy(update={"node_rank": node_rank, "own_address": own})


def ranks_environment(gang: Gang, num_cpus: int) -> dict[str, str]:
    """Return the environment of a node's ranks, which share its CPUs."""
    ours = {
        GANG_VARIABLE: gang.model_dump_json(),
        "OMP_NUM_THREADS": str(max(1, num_cpus // gang.num_processes)),
    }
    return os.environ | gang_env(gang) | ours


def torchrun_of(folder: Path, gang: Gang, program: Sequence[str]) -> list[str]:
    """Return the command of a node's torchrun."""
    request = AttemptFolder(folder).request()
    if request is None or not isinstance(request.spec, TrainSpec):
        sys.exit(f"{folder}/spec.json is no training's")
    return torchrun_argv([sys.executable, *program], gang, request.spec.parallel)


def become_torchrun(folder: Path, gang: Gang, program: Sequence[str], num_cpus: int) -> NoReturn:
    """Become this node's torchrun; on other nodes than the first, events go nowhere."""
    argv, env = torchrun_of(folder, gang, program), ranks_environment(gang, num_cpus)
    if gang.node_rank:
        null = os.open(os.devnull, os.O_WRONLY)
        os.set_inheritable(null, True)  # noqa: FBT003 - positional alone
        env[child.EVENT_FD] = str(null)
    os.execve(argv[0], argv, env)  # noqa: S606 - no shell
