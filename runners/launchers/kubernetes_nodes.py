"""Runs a training's ranks in the pods of an Indexed Job.

``... FOLDER`` is every pod's process: the first becomes the supervisor, the others wait for the
rendezvous. The supervisor starts ``... FOLDER NODES RANKS PROGRAM...``, which writes the
rendezvous into the attempt's folder, where the other pods read it, and becomes torchrun. A pod
that fails ends the Job: whether the training goes on from its checkpoint is the server's decision.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from runners.launchers.nodes import OF_NODE, Rendezvous, become_torchrun, joined, num_cpus
from runners.shared.messages import Gang
from runners.supervision import child, supervisor

INDEX = "JOB_COMPLETION_INDEX"  # set by Kubernetes in every pod of an Indexed Job
ADDRESS = "SLIPWAY_POD_IP"  # set by our Job, from the pod's status
PORT = 29400  # each pod has addresses of its own
# Variables of a pod that the job inherits: its devices and address.
OF_POD = (*OF_NODE, "KUBERNETES_SERVICE_HOST", ADDRESS)
NOT_SHARED = frozenset({*OF_POD, INDEX, child.EVENT_FD})


def _lead(folder: Path, num_nodes: int, num_processes: int, program: Sequence[str]) -> None:
    """Write the rendezvous and become the first node's torchrun."""
    address = os.environ[ADDRESS]
    gang = Gang(
        node_rank=0,
        num_nodes=num_nodes,
        num_processes=num_processes,
        master_address=address,
        master_port=PORT,
        own_address=address,
        rendezvous_id=f"kubernetes-{folder.name}",
    )
    Rendezvous.write(folder, gang, program, NOT_SHARED)
    become_torchrun(folder, gang, program, num_cpus(os.environ))


def _join(folder: Path, index: int) -> None:
    """Wait for the rendezvous and become another node's torchrun; end where the attempt ended."""
    first = Rendezvous.wait(folder)
    os.environ |= first.environment
    become_torchrun(folder, joined(first.gang, index), first.program, num_cpus(os.environ))


def main(arguments: Sequence[str]) -> None:
    """Become what this pod's part is."""
    folder = Path(arguments[0])
    if arguments[1:]:
        num_nodes, num_processes, *program = arguments[1:]
        _lead(folder, int(num_nodes), int(num_processes), program)
    elif index := int(os.environ[INDEX]):
        _join(folder, index)
    order = [str(folder), supervisor.STAY]
    argv = [sys.executable, "-S", "-E", supervisor.__file__, *order]
    os.execv(argv[0], argv)  # noqa: S606 - no shell


if __name__ == "__main__":
    main(sys.argv[1:])
