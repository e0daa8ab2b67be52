"""Runs one short command on a node of a Ray cluster: ``... HOST_FOLDER COMMAND...``.

The micro-benchmark of a host that hands its jobs to Ray measures a node this way, with the
resources of a job. The command writes its output to a file of the host's folder, which is then
printed: Ray's own log would mix it with what libraries print to stderr.
"""

import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from runners.launchers.ray import Work, read_job, submit_work
from runners.launchers.ray_api import Api
from runners.launchers.scheduler import PREFIX, Phase, SchedulerError
from runners.shared.config import HostDir
from runners.shared.timing import scale_duration

START_SECONDS = 200.0  # for a free node; otherwise retried later
POLL_SECONDS = scale_duration(2.0, least=0.1)
OUTPUT = "output"


def _on_sigterm(*_: object) -> NoReturn:
    sys.exit("it was stopped")


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 0 and print its output, or 1 with Ray's words."""
    host, *command = arguments
    host_dir = HostDir(Path(host))
    config = host_dir.config().ray
    if config is None:
        sys.exit(f"{host}/config.json names no Ray cluster")
    signal.signal(signal.SIGTERM, _on_sigterm)
    api, name = Api(config), f"{PREFIX}run-{secrets.token_hex(16)}"
    folder = host_dir.path / f".{name}"
    folder.mkdir(mode=0o700)
    words = ["/bin/sh", "-c", f"exec {shlex.join(command)} > {OUTPUT}"]
    try:
        submit_work(api, Work(name, folder, words), config)
        try:
            _wait(api, name, folder)
        finally:
            api.stop(name)
        sys.stdout.write((folder / OUTPUT).read_text())
    except (SchedulerError, TimeoutError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _wait(api: Api, name: str, folder: Path) -> None:
    """Wait until a job has ended.

    Raises:
        TimeoutError: no node took it, or it failed.
    """
    deadline = time.monotonic() + START_SECONDS
    while True:
        found = api.job(name)
        job = read_job(found, folder) if found else None
        if job is None:
            raise TimeoutError("somebody deleted the job")
        if job.phase is Phase.ENDED:
            if job.state != "SUCCEEDED":
                words = f": {job.end_words}" if job.end_words else ""
                raise TimeoutError(f"the job ended as {job.state}{words}")
            return
        if job.phase is Phase.WAITING and time.monotonic() > deadline:
            raise TimeoutError(f"no node took it in {START_SECONDS:.0f} s: {job.detail}")
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
