"""The launcher interface, and attempts as local processes."""

import signal
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from runners.launchers import launch
from runners.launchers.attempts import LOST_REASONS, AttemptFolder, Verdict
from runners.launchers.launch import LaunchRefusedError
from runners.shared.messages import RunRequest
from runners.shared.reasons import Reason
from runners.supervision import child, procfs, supervisor

# The launcher interface: start, inspect and stop attempts, and explain unrecorded ends.


class UnrecordedEnd(NamedTuple):
    """The reason and a readable explanation of an end without an exit record."""

    reason: Reason
    explanation: str = ""


class Launcher(Protocol):
    """Starts, inspects and stops the supervisors of this host."""

    def refresh(self, folders: Sequence[AttemptFolder]) -> None:
        """Refresh the launcher's state; called before each round of ``verdict_of``."""

    def verdict_of(self, folder: AttemptFolder) -> Verdict:
        """Return an attempt's state."""

    def adapt(self, document: Mapping[str, Any], request: RunRequest) -> dict[str, Any]:
        """Return the supervisor's launch document, adapted to this launcher.

        Raises:
            LaunchRefusedError: this launcher cannot run such a job.
        """

    def launch(self, folder: AttemptFolder) -> None:
        """Start a folder's supervisor after its documents are written; idempotent.

        Raises:
            LaunchRefusedError: the attempt cannot start.
        """

    def stop(self, folder: AttemptFolder) -> None:
        """Make the supervisor read the stop order in its folder now."""

    def unrecorded_end(self, folder: AttemptFolder, verdict: Verdict) -> UnrecordedEnd | None:
        """Return why an attempt ended without a record, or None if it did not."""

    def waits_for(self, folder: AttemptFolder) -> str:
        """Return what a claimed attempt waits for outside of this host, or ""."""


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
        if identity := child.read_json(folder.path / child.SUPERVISOR):
            pid, ticks = int(identity["pid"]), int(identity["start_ticks"])
            procfs.send_signal(pid, ticks, signal.SIGTERM)

    def unrecorded_end(self, folder: AttemptFolder, verdict: Verdict) -> UnrecordedEnd | None:  # noqa: ARG002 - the interface
        """Return the reason of a lost attempt."""
        reason = LOST_REASONS.get(verdict)
        return UnrecordedEnd(reason) if reason else None

    def waits_for(self, folder: AttemptFolder) -> str:  # noqa: ARG002 - the interface
        """Return "": local attempts start at once."""
        return ""
