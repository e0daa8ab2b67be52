"""Runs an attempt's processes on the nodes of its Ray placement group.

``... FOLDER`` is what ``ray_driver`` starts on every node: on the first it becomes the supervisor,
on the others it waits for the rendezvous and becomes their torchrun. The supervisor starts
``... FOLDER NODES RANKS PROGRAM...``, which writes the rendezvous into the attempt's folder and
runs the first node's torchrun. Before it ends with an error it asks the driver whether Ray lost a
node: such an attempt leaves no exit record, and goes on where it is placed next.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn
from zlib import crc32

from runners.launchers.nodes import (
    OF_NODE,
    Rendezvous,
    become_torchrun,
    free_port,
    joined,
    num_cpus,
    ranks_environment,
    torchrun_of,
)
from runners.launchers.ray_driver import ADDRESS, ANSWER, ASK, INDEX, NODE_SECONDS, RUN, WORDS
from runners.shared.messages import Gang
from runners.supervision import child, supervisor

FIRST_PORT, NUM_PORTS = 10_000, 20_000  # below the ports that Linux gives to connections
POLL_SECONDS = 0.2
ANSWER_SECONDS = NODE_SECONDS + 30.0
# Variables that the job inherits of what Ray and the driver set for this node.
OF_BUNDLE = (*OF_NODE, ADDRESS, RUN, WORDS)
NOT_SHARED = frozenset({*OF_BUNDLE, INDEX, child.EVENT_FD})
LOST = "RANK_LOST"


def _rendezvous_id(folder: Path, run: str) -> str:
    return f"ray-{folder.name}-{run}"


def _port(rendezvous_id: str, address: str) -> int:
    """Return a free port for the rendezvous, another one for each attempt and placement."""
    start = crc32(rendezvous_id.encode()) % NUM_PORTS
    return free_port(address, range(FIRST_PORT, FIRST_PORT + NUM_PORTS), start)


class FirstNode:
    """The ranks of the first node, and what the driver says of the others."""

    def __init__(
        self, folder: Path, num_nodes: int, num_processes: int, program: Sequence[str]
    ) -> None:
        self._folder, self._run = folder, int(os.environ[RUN])
        self._is_stopping = False
        signal.signal(signal.SIGTERM, self._on_sigterm)  # torchrun gets it itself
        _report(os.environ[WORDS])
        address, rendezvous_id = os.environ[ADDRESS], _rendezvous_id(folder, os.environ[RUN])
        gang = Gang(
            node_rank=0,
            num_nodes=num_nodes,
            num_processes=num_processes,
            master_address=address,
            master_port=_port(rendezvous_id, address),
            own_address=address,
            rendezvous_id=rendezvous_id,
        )
        Rendezvous.write(folder, gang, program, NOT_SHARED)
        me, events = os.getpid(), os.environ.get(child.EVENT_FD)
        self._torchrun = subprocess.Popen(
            torchrun_of(folder, gang, program),
            env=ranks_environment(gang, num_cpus(os.environ)),
            stdin=subprocess.DEVNULL,
            pass_fds=[int(events)] if events else [],
            preexec_fn=lambda: child.die_with(me),  # noqa: PLW1509 - this process has one thread
        )

    def _on_sigterm(self, *_: object) -> None:
        self._is_stopping = True

    def run(self) -> int:
        """Wait for the ranks and return their exit status; a lost node ends them."""
        while (code := self._torchrun.poll()) is None:
            if answer := self._answer():
                self._torchrun.terminate()
                return self._take(answer, self._torchrun.wait() or 1)
            time.sleep(POLL_SECONDS)
        if code and not self._is_stopping:
            child.write_json(self._folder / ASK, {"run": self._run})
            return self._take(self._wait_for_answer(), code)
        return code

    def _answer(self) -> Mapping[str, str] | None:
        found = child.read_json(self._folder / ANSWER)
        return found if found and found["run"] == self._run else None

    def _wait_for_answer(self) -> Mapping[str, str]:
        until = time.monotonic() + ANSWER_SECONDS
        while (answer := self._answer()) is None and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        return answer or {"failed": "", "lost": ""}

    def _take(self, answer: Mapping[str, str], code: int) -> int:
        if lost := answer["lost"]:
            _report(f"{lost} was lost: the attempt is placed again")
            child.write_json(self._folder / child.REQUEUED, {"run": self._run, "lost": lost})
        elif failed := answer["failed"]:
            _report(f"{LOST}: {failed}")
        return code


def _report(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _join(folder: Path, index: int) -> NoReturn:
    """Wait for this placement's rendezvous and become another node's torchrun."""
    first = Rendezvous.wait(folder, _rendezvous_id(folder, os.environ[RUN]))
    os.environ |= first.environment
    become_torchrun(folder, joined(first.gang, index), first.program, num_cpus(os.environ))


def _become(folder: Path, index: int) -> NoReturn:
    """Become a node's part: the supervisor on the first, the ranks on another."""
    child.die_with(os.getppid())  # Ray's worker, which ends with its node and its bundle
    if index:
        _join(folder, index)
    argv = [sys.executable, "-S", "-E", supervisor.__file__, str(folder), supervisor.STAY]
    os.execv(argv[0], argv)  # noqa: S606 - no shell


def main(arguments: Sequence[str]) -> int:
    """Become a node's part, or run the first node's ranks."""
    folder, *rest = arguments
    if not rest:
        _become(Path(folder), int(os.environ[INDEX]))
    num_nodes, num_processes, *program = rest
    return FirstNode(Path(folder), int(num_nodes), int(num_processes), program).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
