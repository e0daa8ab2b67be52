"""Rules of the house that hold a job back whatever is free, each with its sentence."""

from collections.abc import Sequence
from datetime import timedelta

from runners.timing import scaled
from webapp.core.clock import now
from webapp.jobs.models import Event, Job, JobState

PREFLIGHT_RETRY = timedelta(seconds=scaled(30, least=1))


class Rules:
    """What holds the jobs of one queue back, asked once for all of them."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._failed = {event.subject: event for event in failed_preflights(jobs)}

    def __call__(self, job: Job) -> str:
        """Return why the job may not be tried now, or nothing."""
        return self._resting(job)

    def _resting(self, job: Job) -> str:
        """Return what a job that came back from its preflight waits for."""
        failed = self._failed.get(job.pk)
        if failed is None or failed.at + PREFLIGHT_RETRY <= now():
            return ""
        checks = failed.detail.get("checks", [])
        sentences = [check["sentence"] for check in checks if not check["ok"]]
        return "The last check failed and is tried again: " + " ".join(sentences)


def failed_preflights(jobs: Sequence[Job]) -> list[Event]:
    """Return every preflight that sent one of the jobs back to the queue, the oldest first."""
    events = Event.objects.filter(
        kind="job.state",
        subject__in=[job.pk for job in jobs],
        from_state=JobState.PREFLIGHT,
        to_state=JobState.QUEUED,
    )
    return list(events.order_by("id"))
