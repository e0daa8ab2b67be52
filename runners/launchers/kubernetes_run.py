"""Runs one short command in a pod and prints its output: ``... HOST_FOLDER COMMAND...``.

The micro-benchmark of a host that hands its jobs to a cluster measures a node this way, with the
resources of a job. The pod writes the output to a file of the host's folder: its log would mix it
with what libraries print to stderr.
"""

import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from runners.launchers.kubernetes_api import Api, KubernetesError
from runners.launchers.kubernetes_objects import OF_JOB, Work, job_object, read_job
from runners.launchers.scheduler import Phase
from runners.shared.config import HostDir
from runners.shared.timing import scale_duration

START_SECONDS = 200.0  # for a free node; otherwise retried later
LIMIT_SECONDS = 300
POLL_SECONDS = scale_duration(2.0, least=0.1)


def _on_sigterm(*_: object) -> NoReturn:
    sys.exit("it was stopped")


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 0 and print its output, or 1 with the cluster's words."""
    folder, *command = arguments
    host_dir = HostDir(Path(folder))
    config = host_dir.config().kubernetes
    if config is None:
        sys.exit(f"{folder}/config.json names no cluster")
    signal.signal(signal.SIGTERM, _on_sigterm)
    api, name = Api(config), f"slipway-run-{secrets.token_hex(16)}"
    output = host_dir.path / f".{name}.out"
    words = ["/bin/sh", "-c", f"exec {shlex.join(command)} > {shlex.quote(str(output))}"]
    user = (os.getuid(), os.getgid())
    work = Work(name, words, str(host_dir.path), LIMIT_SECONDS, 1, user)
    try:
        api.create_job(job_object(work, config))
        try:
            _wait(api, name)
        finally:
            api.delete_job(name)
        sys.stdout.write(output.read_text())
    except (KubernetesError, TimeoutError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        output.unlink(missing_ok=True)
    return 0


def _wait(api: Api, name: str) -> None:
    """Wait until a Job has ended.

    Raises:
        TimeoutError: no node took it, or it failed.
    """
    deadline = time.monotonic() + START_SECONDS
    while True:
        found = api.job(name)
        job = read_job(found, api.pods(f"{OF_JOB}={name}")) if found else None
        if job is None:
            raise TimeoutError("somebody deleted the pod")
        if job.phase is Phase.ENDED:
            if job.state != "Complete":
                raise TimeoutError(f"the pod ended as {job.state}")
            return
        if job.phase is Phase.WAITING and time.monotonic() > deadline:
            raise TimeoutError(f"no node took it in {START_SECONDS:.0f} s: {job.detail}")
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
