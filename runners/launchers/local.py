"""Launches attempts as local processes; the supervisor's lock shows that it runs."""

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from runners import launch, supervisor
from runners.attempts import LOST, AttemptFolder, Verdict
from runners.launch import LaunchRefusedError
from runners.launchers.base import UnrecordedEnd
from runners.messages import RunRequest
from runners.reasons import Reason
from runners.supervision import procfs, record


class LocalLauncher:
    """Starts supervisors as local processes."""

    def __init__(self, boot_id: str) -> None:
        self._boot_id = boot_id

    def refresh(self, folders: Sequence[AttemptFolder]) -> None:
        """Do nothing: locks and files are read on demand."""

    def verdict_of(self, folder: AttemptFolder) -> Verdict:
        """Return the attempt's state from its lock and files."""
        return folder.verdict(self._boot_id)

    def adapt(self, document: Mapping[str, Any], request: RunRequest) -> dict[str, Any]:  # noqa: ARG002 - the interface
        """Return the document unchanged."""
        return dict(document)

    def launch(self, folder: AttemptFolder) -> None:
        """Start the supervisor, detached.

        Raises:
            LaunchRefusedError: the supervisor failed at once.
        """
        if launch.start_supervisor(folder.path) == supervisor.EXIT_INTERNAL:
            raise LaunchRefusedError(
                Reason.INTERNAL, "the supervisor failed; see its supervisor.log"
            )

    def stop(self, folder: AttemptFolder) -> None:
        """Signal the supervisor to read its stop order now."""
        if identity := record.read_json(folder.path / record.SUPERVISOR):
            pid, ticks = int(identity["pid"]), int(identity["start_ticks"])
            procfs.send_signal(pid, ticks, signal.SIGTERM)

    def unrecorded_end(self, folder: AttemptFolder, verdict: Verdict) -> UnrecordedEnd | None:  # noqa: ARG002 - the interface
        """Return the reason of a lost attempt."""
        reason = LOST.get(verdict)
        return UnrecordedEnd(reason) if reason else None

    def waits_for(self, folder: AttemptFolder) -> str:  # noqa: ARG002 - the interface
        """Return "": local attempts start at once."""
        return ""
