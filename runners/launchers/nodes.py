"""A training's ranks on one node of several that a scheduler gave to one job.

All nodes share the attempt's folder: the first node's lead rank writes it, and the events of the
others' lead ranks are dropped.
"""

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from runners.jobspec import TrainSpec
from runners.launchers.attempts import AttemptFolder
from runners.launchers.launch import gang_env, torchrun_argv
from runners.shared.messages import GANG_VARIABLE, Gang
from runners.supervision import child


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
