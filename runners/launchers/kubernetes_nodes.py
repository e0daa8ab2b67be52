"""Runs a training's ranks in the pods of an Indexed Job.

``... FOLDER`` is every pod's process: the first becomes the supervisor, the others wait for the
rendezvous. The supervisor starts ``... FOLDER NODES RANKS PROGRAM...``, which writes the
rendezvous into the attempt's folder, where the other pods read it, and becomes torchrun. A pod
that fails ends the Job: whether the training goes on from its checkpoint is the server's decision.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from runners.launchers.attempts import AttemptFolder
from runners.launchers.nodes import become_torchrun, joined
from runners.shared.messages import Gang
from runners.supervision import child, supervisor

INDEX = "JOB_COMPLETION_INDEX"  # set by Kubernetes in every pod of an Indexed Job
ADDRESS = "SLIPWAY_POD_IP"  # set by our Job, from the pod's status
PORT = 29400  # each pod has addresses of its own
RENDEZVOUS = "rendezvous.json"
POLL_SECONDS = 1.0
# Variables of a pod that the job inherits: its devices and address.
OF_POD = (
    "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES", "KUBERNETES_SERVICE_HOST",
    "LD_LIBRARY_PATH", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "ROCR_VISIBLE_DEVICES",
    ADDRESS,
)  # fmt: skip
NOT_SHARED = frozenset({*OF_POD, INDEX, child.EVENT_FD})


class Rendezvous(BaseModel):
    """What the first pod tells the others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gang: Gang
    program: tuple[str, ...]
    environment: dict[str, str]  # of the job; each pod keeps its own devices


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
    kept = {name: value for name, value in os.environ.items() if name not in NOT_SHARED}
    told = Rendezvous(gang=gang, program=tuple(program), environment=kept)
    child.write_json(folder / RENDEZVOUS, told.model_dump(mode="json"))
    become_torchrun(folder, gang, program, _num_cpus())


def _join(folder: Path, index: int) -> None:
    """Wait for the rendezvous and become another node's torchrun; end where the attempt ended."""
    attempt = AttemptFolder(folder)
    while (told := child.read_json(folder / RENDEZVOUS)) is None:
        if attempt.exit_record():
            sys.exit(f"the attempt in {folder} ended before its ranks started")
        time.sleep(POLL_SECONDS)
    first = Rendezvous.model_validate(told)
    os.environ |= first.environment
    become_torchrun(folder, joined(first.gang, index), first.program, _num_cpus())


def _num_cpus() -> int:
    """Return the CPUs of this pod: the Job states them as its number of threads."""
    return int(os.environ.get("OMP_NUM_THREADS", "1"))


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
