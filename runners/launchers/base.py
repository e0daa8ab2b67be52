"""What every way to launch answers: start it, say how it stands, stop it, say how it ended."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from runners.attempts import AttemptFolder, Verdict
from runners.messages import RunRequest
from runners.reasons import Reason


class Lost(NamedTuple):
    """Why an attempt is over that recorded no end of its own, with a sentence for a person."""

    reason: Reason
    explanation: str = ""


class Launcher(Protocol):
    """The one place that knows where the supervisors of this host run."""

    def look(self, folders: Sequence[AttemptFolder]) -> None:
        """Bring what is known of the attempts up to date; called before each round of verdicts."""

    def judge(self, folder: AttemptFolder) -> Verdict:
        """Return how an attempt stands."""

    def adapt(self, document: Mapping[str, Any], request: RunRequest) -> dict[str, Any]:
        """Return the supervisor's document as this way to launch wants it.

        Raises:
            LaunchRefusedError: such a job cannot be launched this way.
        """

    def launch(self, folder: AttemptFolder) -> None:
        """Start the supervisor of a folder whose documents are written; at most one ever runs.

        Raises:
            LaunchRefusedError: it will never start.
        """

    def stop(self, folder: AttemptFolder) -> None:
        """Have the supervisor obey the order to stop that lies in its folder."""

    def lost(self, folder: AttemptFolder, verdict: Verdict) -> Lost | None:
        """Return why an attempt with this verdict ended, or None when it did not get lost."""

    def waits_for(self, folder: AttemptFolder) -> str:
        """Return what a claimed attempt waits for outside of this host; "" when for nothing."""
