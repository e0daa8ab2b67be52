"""What pages ask about jobs: above all why one is waiting."""

from webapp.jobs.models import Job, JobState
from webapp.queue.words import waiting_line


def waiting_sentence(job: Job) -> str | None:
    """Return why a queued job has not started, in one sentence; None for any other job."""
    if job.state != JobState.QUEUED:
        return None
    line = waiting_line(job)
    return line.sentence if line else None
