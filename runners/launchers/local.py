"""Attempts on this machine: the supervisor is a process here, and its lock says that it lives."""

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from runners import launch, supervisor
from runners.attempts import LOST, AttemptFolder, Verdict
from runners.launch import LaunchRefusedError
from runners.launchers.base import Lost
from runners.messages import RunRequest
from runners.reasons import Reason
from runners.supervision import procfs, record


class LocalLauncher:
    """Starts supervisors as processes of this machine."""

    def __init__(self, boot_id: str) -> None:
        self._boot_id = boot_id

    def look(self, folders: Sequence[AttemptFolder]) -> None:
        """Do nothing: locks and files are read when they are asked for."""

    def judge(self, folder: AttemptFolder) -> Verdict:
        """Return what lock and files mean on a machine in this boot."""
        return folder.judge(self._boot_id)

    def adapt(self, document: Mapping[str, Any], request: RunRequest) -> dict[str, Any]:  # noqa: ARG002 - the interface
        """Return the document as it is."""
        return dict(document)

    def launch(self, folder: AttemptFolder) -> None:
        """Start the supervisor, detached.

        Raises:
            LaunchRefusedError: it failed at once.
        """
        if launch.start_supervisor(folder.path) == supervisor.EXIT_INTERNAL:
            raise LaunchRefusedError(
                Reason.INTERNAL, "the supervisor failed; see its supervisor.log"
            )

    def stop(self, folder: AttemptFolder) -> None:
        """Wake the supervisor, so that it reads its order now."""
        if identity := record.read_json(folder.path / record.SUPERVISOR):
            pid, ticks = int(identity["pid"]), int(identity["start_ticks"])
            procfs.send_signal(pid, ticks, signal.SIGTERM)

    def lost(self, folder: AttemptFolder, verdict: Verdict) -> Lost | None:  # noqa: ARG002 - the interface
        """Return the reason that the verdict stands for."""
        reason = LOST.get(verdict)
        return Lost(reason) if reason else None

    def waits_for(self, folder: AttemptFolder) -> str:  # noqa: ARG002 - the interface
        """Return "": here an attempt starts at once."""
        return ""
