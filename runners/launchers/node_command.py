"""Runs one short command on a node of a cluster: ``... HOST_FOLDER COMMAND...``.

The micro-benchmark of a host that hands its jobs to Kubernetes or Ray measures a node this way,
with the resources of a job. The command writes its output to a file of the host's folder, which
is then printed: a cluster's own log would mix it with what libraries print to stderr.
"""

import os
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NoReturn, Protocol

from runners.launchers import kubernetes_api, kubernetes_objects, ray, ray_api
from runners.launchers.scheduler import PREFIX, Phase, ScheduledJob, SchedulerError
from runners.shared.config import HostConfig, HostDir
from runners.shared.kubernetes import KubernetesConfig
from runners.shared.ray import RayConfig
from runners.shared.timing import scale_duration

START_SECONDS = 200.0  # for a free node; otherwise retried later
LIMIT_SECONDS = 300  # of the command, where the cluster enforces one
POLL_SECONDS = scale_duration(2.0, least=0.1)
OUTPUT = "output"


class _Cluster(Protocol):
    """What a command needs of a cluster."""

    SUCCEEDED: ClassVar[str]  # state of a job whose command ended with 0

    def submit(self, name: str, folder: Path, command: Sequence[str]) -> None:
        """Submit a job that runs a command in a folder that every node sees."""

    def read(self, name: str, folder: Path) -> ScheduledJob | None:
        """Return the job; None: there is none."""

    def end(self, name: str) -> None:
        """End the job, if it has not ended."""


class _Kubernetes:
    SUCCEEDED: ClassVar[str] = "Complete"

    def __init__(self, config: KubernetesConfig) -> None:
        self._config, self._api = config, kubernetes_api.Api(config)

    def submit(self, name: str, folder: Path, command: Sequence[str]) -> None:
        user = (os.getuid(), os.getgid())
        work = kubernetes_objects.Work(name, command, str(folder), LIMIT_SECONDS, 1, user)
        self._api.create_job(kubernetes_objects.job_object(work, self._config))

    def read(self, name: str, _folder: Path) -> ScheduledJob | None:
        if (found := self._api.job(name)) is None:
            return None
        pods = self._api.pods(f"{kubernetes_objects.OF_JOB}={name}")
        return kubernetes_objects.read_job(found, pods)

    def end(self, name: str) -> None:
        self._api.delete_job(name)


class _Ray:
    SUCCEEDED: ClassVar[str] = "SUCCEEDED"

    def __init__(self, config: RayConfig) -> None:
        self._config, self._api = config, ray_api.Api(config)

    def submit(self, name: str, folder: Path, command: Sequence[str]) -> None:
        ray.submit_work(self._api, ray.Work(name, folder, command), self._config)

    def read(self, name: str, folder: Path) -> ScheduledJob | None:
        found = self._api.job(name)
        return ray.read_job(found, folder) if found else None

    def end(self, name: str) -> None:
        self._api.stop(name)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 0 and print its output, or 1 with the cluster's words."""
    host, *command = arguments
    host_dir = HostDir(Path(host))
    signal.signal(signal.SIGTERM, _on_sigterm)
    cluster, name = _cluster(host, host_dir.config()), f"{PREFIX}run-{secrets.token_hex(16)}"
    folder = host_dir.path / f".{name}"
    folder.mkdir(mode=0o700)
    try:
        cluster.submit(name, folder, ["/bin/sh", "-c", f"exec {shlex.join(command)} > {OUTPUT}"])
        try:
            _wait(cluster, name, folder)
        finally:
            cluster.end(name)
        sys.stdout.write((folder / OUTPUT).read_text())
    except (SchedulerError, TimeoutError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _on_sigterm(*_: object) -> NoReturn:
    sys.exit("it was stopped")


def _cluster(host: str, config: HostConfig) -> _Cluster:
    if config.kubernetes is not None:
        return _Kubernetes(config.kubernetes)
    if config.ray is not None:
        return _Ray(config.ray)
    sys.exit(f"{host}/config.json names neither a Kubernetes nor a Ray cluster")


def _wait(cluster: _Cluster, name: str, folder: Path) -> None:
    """Wait until a job has ended.

    Raises:
        TimeoutError: no node took it, or it failed.
    """
    deadline = time.monotonic() + START_SECONDS
    while True:
        job = cluster.read(name, folder)
        if job is None:
            raise TimeoutError("somebody deleted the job")
        if job.phase is Phase.ENDED:
            if job.state != cluster.SUCCEEDED:
                words = f": {job.end_words}" if job.end_words else ""
                raise TimeoutError(f"the job ended as {job.state}{words}")
            return
        if job.phase is Phase.WAITING and time.monotonic() > deadline:
            raise TimeoutError(f"no node took it in {START_SECONDS:.0f} s: {job.detail}")
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
