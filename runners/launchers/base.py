"""The launcher interface: start, inspect and stop attempts, and explain unrecorded ends."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from runners.attempts import AttemptFolder, Verdict
from runners.messages import RunRequest
from runners.reasons import Reason


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
