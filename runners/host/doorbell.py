"""Runs the Celery worker that receives wake-up messages ("doorbells") as the agent's child.

The worker may die after a broker outage, a damaged message or kill -9. The agent restarts it;
heartbeats carry everything meanwhile.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from runners.host.app import AGENT_VARIABLE, HOST_DIR_VARIABLE, QUEUE
from runners.shared.config import HostDir
from runners.shared.timing import DOORBELL_STOP_SECONDS, scale_duration

FIRST_REST_SECONDS = scale_duration(1.0, least=0.2)
LONGEST_REST_SECONDS = scale_duration(60.0, least=2.0)
STEADY_SECONDS = scale_duration(60.0)  # a worker that ran this long resets the backoff
COMMAND = (
    # In a container root is the only user; the worker accepts only JSON, which is not executable.
    sys.executable, "-W", "ignore:You're running the worker with superuser privileges",
    "-m", "celery", "-A", "runners.host.app", "--quiet", "worker", "-Q", QUEUE,
    "-c", "2", "--without-gossip", "--without-mingle", "--without-heartbeat",
    "--loglevel", "WARNING",
)  # fmt: skip

log = logging.getLogger(__name__)


class DoorbellWorkerSupervisor:
    """Keeps one worker running, with exponential backoff between restarts."""

    def __init__(self, host_dir: HostDir, command: Sequence[str] = COMMAND) -> None:
        self._host_dir = host_dir
        self._command = command
        self._child: subprocess.Popen[bytes] | None = None
        self._rest_seconds = FIRST_REST_SECONDS
        self._started_at = 0.0
        self._not_before = 0.0

    @property
    def pid(self) -> int | None:
        """The worker's process id, or None."""
        return self._child.pid if self._child else None

    def keep_running(self) -> None:
        """Start the worker, or restart it if it died and its backoff has passed."""
        if self._child and self._child.poll() is not None:
            returncode = self._child.returncode
            log.warning("the doorbell's worker ended with %d; it is started again", returncode)
            now = time.monotonic()
            if now - self._started_at > STEADY_SECONDS:
                self._rest_seconds = FIRST_REST_SECONDS
            self._not_before = now + self._rest_seconds
            self._rest_seconds = min(self._rest_seconds * 2, LONGEST_REST_SECONDS)
            self._child = None
        if self._child is None and time.monotonic() >= self._not_before:
            self._start()

    def stop(self) -> None:
        """Stop the worker and its child processes."""
        if self._child is None:
            return
        self._child.terminate()
        try:
            self._child.wait(DOORBELL_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
        self._child = None

    def _start(self) -> None:
        self._started_at = time.monotonic()
        own = {HOST_DIR_VARIABLE: str(self._host_dir.path), AGENT_VARIABLE: str(os.getpid())}
        self._child = subprocess.Popen(
            list(self._command),
            stdin=subprocess.DEVNULL,
            env=os.environ | own,
            start_new_session=True,
        )
