"""Keeps child processes of the agent running: the doorbell's worker and the tunnel."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from runners.shared.config import HostDir
from runners.shared.timing import scale_duration

HOST_DIR_VARIABLE = "SLIPWAY_HOST_DIR"
AGENT_VARIABLE = "SLIPWAY_AGENT_PID"
FIRST_REST_SECONDS = scale_duration(1.0, least=0.2)
LONGEST_REST_SECONDS = scale_duration(60.0, least=2.0)
STEADY_SECONDS = scale_duration(60.0)  # a process that ran this long resets the backoff
TUNNEL_STOP_SECONDS = 2.0
TUNNEL_COMMAND = (sys.executable, "-m", "runners.host.tunnel")

log = logging.getLogger(__name__)


class ChildSupervisor:
    """Keeps one process running, with exponential backoff between restarts."""

    def __init__(
        self, host_dir: HostDir, name: str, command: Sequence[str], stop_seconds: float
    ) -> None:
        self._host_dir = host_dir
        self._name = name
        self._command = command
        self._stop_seconds = stop_seconds
        self._child: subprocess.Popen[bytes] | None = None
        self._rest_seconds = FIRST_REST_SECONDS
        self._started_at = 0.0
        self._not_before = 0.0

    @property
    def pid(self) -> int | None:
        """The child's process id, or None."""
        return self._child.pid if self._child else None

    def keep_running(self) -> None:
        """Start the process, or restart it if it died and its backoff has passed."""
        if self._child and self._child.poll() is not None:
            log.warning(
                "%s ended with %d; it is started again", self._name, self._child.returncode
            )
            now = time.monotonic()
            if now - self._started_at > STEADY_SECONDS:
                self._rest_seconds = FIRST_REST_SECONDS
            self._not_before = now + self._rest_seconds
            self._rest_seconds = min(self._rest_seconds * 2, LONGEST_REST_SECONDS)
            self._child = None
        if self._child is None and time.monotonic() >= self._not_before:
            self._start()

    def stop(self) -> None:
        """Stop the process and its child processes."""
        if self._child is None:
            return
        self._child.terminate()
        try:
            self._child.wait(self._stop_seconds)
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


class TunnelSupervisor(ChildSupervisor):
    """Keeps the tunnel's process running while the server names gateways."""

    def __init__(self, host_dir: HostDir) -> None:
        super().__init__(host_dir, "the tunnel", (), TUNNEL_STOP_SECONDS)
        self._gateways: tuple[str, ...] = ()

    def obey(self, gateways: tuple[str, ...]) -> None:
        """Take the addresses of a reply; other ones stop the process, to be started with them."""
        if gateways != self._gateways:
            self.stop()
            self._gateways = gateways
            self._command = (*TUNNEL_COMMAND, *gateways)

    def keep_running(self) -> None:
        """Start the process, or restart it, if there is a gateway."""
        if self._gateways:
            super().keep_running()
