"""Parts of benchmarks of a host: a job that logs steadily, its supervisor, a shipper, a tunnel.

Supervisor and tunnel are the normal ones; the process ships as the agent's thread does.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from runners.host.companions import TunnelSupervisor
from runners.host.shipping import RedisStream, ServerClient, Shipping
from runners.launchers.attempts import AttemptFolder
from runners.shared.config import Credential, HostDir
from runners.shared.messages import EndpointBody
from runners.supervision import child, procfs

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

SUPERVISOR = Path(__file__).parents[1] / "supervision" / "supervisor.py"
JOB = """
import time
begun, sent = time.monotonic(), 0
while True:
    time.sleep(max(0.0, begun + sent / {rate} - time.monotonic()))
    print(f"step {{sent}}: loss {{1 / (sent + 1):.6f}}, {{sent % 7 + 512}} tokens/s", flush=True)
    sent += 1
"""


def make_attempt(
    host_dir: HostDir, attempt_id: str, fence: str, lines_per_second: float
) -> AttemptFolder:
    """Return an attempt folder that is ready for its supervisor."""
    folder = AttemptFolder(host_dir.attempts / attempt_id)
    folder.make_claim(fence, procfs.boot_id())
    launch = {
        "attempt_id": attempt_id,
        "argv": [sys.executable, "-c", JOB.format(rate=lines_per_second)],
        "env": {"PATH": os.environ["PATH"]},
        "max_duration_seconds": None,
    }
    child.write_json(folder.path / child.LAUNCH, launch)
    return folder


@contextlib.contextmanager
def run_supervisor(folder: AttemptFolder) -> Iterator[int]:
    """Run the attempt's supervisor, yield its pid, and stop it and its job."""
    command = [sys.executable, "-S", "-E", str(SUPERVISOR), str(folder.path), "--stay"]
    process = subprocess.Popen(command)
    try:
        yield process.pid
    finally:
        child.write_json(folder.path / child.STOP, {"grace_seconds": 0.1})
        process.terminate()
        process.wait()


@contextlib.contextmanager
def run_tunnel(credential: Credential, path: Path, endpoint: EndpointBody) -> Iterator[int]:
    """Run a host's tunnel to its server, yield its pid, and stop it.

    The host has one attempt, with the host's id, that runs and has reported an endpoint.
    """
    host_dir = HostDir(path)
    host_dir.make()
    host_dir.save_credential(credential)
    folder = AttemptFolder(host_dir.attempts / credential.host_id)
    folder.path.mkdir()
    child.write_json(folder.path / child.ENDPOINT, endpoint.model_dump(mode="json"))
    tunnel = TunnelSupervisor(host_dir)
    tunnel.obey(("/tunnel/",))
    with child.locked(folder.lock):  # as by its supervisor
        tunnel.keep_running()
        try:
            yield tunnel.pid or 0
        finally:
            tunnel.stop()


def ship(
    path: Path, redis_url: str, host_id: str, span: tuple[float, float], spent: "Queue[float]"
) -> None:
    """Ship a host's events; report the CPU seconds after the settling time."""
    settle, seconds = span
    stream = RedisStream(redis_url, host_id)
    shipping = Shipping(HostDir(path), ServerClient("http://127.0.0.1:9", ""), stream)
    begins_at = time.monotonic() + settle
    before = 0.0
    while (instant := time.monotonic()) < begins_at + seconds:
        if instant < begins_at:
            before = time.process_time()
        time.sleep(shipping.step())
    spent.put(time.process_time() - before)
    shipping.close()
    stream.close()
