"""A Ray cluster of several raylets on this machine, whose GPUs are pretended.

The head has no GPU; each node has two. Ray's own program starts them (``ray start``), in a session
whose files lie in a short folder: the paths of its sockets are limited to 107 characters.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from runners.launchers.ray_api import Api
from runners.shared.ray import RayConfig
from runners.supervision import procfs
from tests.stack import free_port

GPUS, CPUS = 2, 2
ACCELERATOR = "H100"
START_SECONDS, TRIES = 240.0, 3
THREADS = "OMP_NUM_THREADS"  # Ray sets it to a bundle's cores, unless its node has one
STORE_BYTES = 80_000_000  # the least of Ray's object stores: nothing is put into one


class Cluster:
    """A head and its nodes, by name."""

    def __init__(self, folder: Path, nodes: tuple[str, ...] = ("n1", "n2", "n3")) -> None:
        self.folder, self.nodes = folder, nodes
        self._port, self._dashboard = free_port(), free_port()

    @staticmethod
    def program() -> str | None:
        """Return Ray's program: the environment's own, or that of the path."""
        beside = Path(sys.executable).with_name("ray")
        return str(beside) if beside.exists() else shutil.which("ray")

    @classmethod
    def why_not(cls) -> str:
        """Return why no cluster can run here, or ""."""
        return "" if cls.program() else "Ray is not installed: pip install 'ray[default]'"

    @property
    def python(self) -> str:
        """Return the Python that has Ray."""
        return str(Path(self.program() or "").with_name("python"))

    @property
    def address(self) -> str:
        """Return the address of the dashboard."""
        return f"http://127.0.0.1:{self._dashboard}"

    def start(self) -> None:
        """Start the head and every node."""
        self._ray(
            "--head", f"--port={self._port}", f"--dashboard-port={self._dashboard}",
            f"--dashboard-agent-listen-port={free_port()}",
            f"--ray-client-server-port={free_port()}",
            "--node-name=head", "--num-gpus=0", "--num-cpus=1", f"--temp-dir={self.folder}",
            "--disable-usage-stats",
        )  # fmt: skip
        for name in self.nodes:
            self.start_node(name)

    def start_node(self, name: str) -> None:
        """Start a node with its pretended GPUs."""
        self._ray(
            f"--address=127.0.0.1:{self._port}", f"--node-name={name}", f"--num-gpus={GPUS}",
            f"--num-cpus={CPUS}", f"--resources={json.dumps({f'accelerator_type:{ACCELERATOR}': 1})}",
        )  # fmt: skip

    def _ray(self, *arguments: str) -> None:
        """Run ``ray start``, which waits 30 s for its raylet: too short on a busy machine."""
        command = [self.program() or "ray", "start", f"--object-store-memory={STORE_BYTES}"]
        for _ in range(TRIES):
            done = subprocess.run(
                [*command, *arguments],
                env={name: value for name, value in os.environ.items() if name != THREADS}
                | {"RAY_DISABLE_IMPORT_WARNING": "1"},
                capture_output=True,
                text=True,
                timeout=START_SECONDS,
                check=False,
            )
            if done.returncode == 0:
                return
        pytest.fail(f"{done.stdout}\n{done.stderr}")

    def kill_node(self, name: str) -> None:
        """Kill a node's raylet, as if its machine were gone."""
        found = self.api.request("GET", "/api/v0/nodes")["data"]["result"]["result"]
        (node_id,) = [
            each["node_id"]
            for each in found
            if (each["node_name"], each["state"]) == (name, "ALIVE")
        ]
        (pid,) = [pid for pid, words in _commands() if f"--node_id={node_id}" in words]
        os.kill(pid, signal.SIGKILL)

    @property
    def api(self) -> Api:
        """Return our requests to this cluster."""
        return Api(RayConfig(address=self.address))

    def states(self) -> dict[str, str]:
        """Return the states of the jobs by their ids."""
        return {each["submission_id"]: each["status"] for each in self.api.jobs()}

    def stop(self) -> None:
        """Kill every process of this cluster, and what those started."""
        until = time.monotonic() + 20
        while (mine := self._processes()) and time.monotonic() < until:
            for pid in mine:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)

    def _processes(self) -> set[int]:
        marks = (str(self.folder), f":{self._port}")
        own = {
            pid for pid, words in _commands() if "ray" in words and any(m in words for m in marks)
        }
        return {each.pid for pid in own for each in procfs.descendants(pid)} | own - {os.getpid()}


def _commands() -> Iterator[tuple[int, str]]:
    """Return every process of this machine with its command."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                words = (entry / "cmdline").read_text(errors="replace")
                yield int(entry.name), words.replace("\0", " ")
