"""Queries of pages about jobs, mainly why one is waiting."""

from webapp.jobs.models import Job, JobState
from webapp.queue.words import waiting_line


def waiting_sentence(job: Job) -> str | None:
    """Return why a queued job has not started, in one sentence; None for any other job."""
    if job.state != JobState.QUEUED:
        return None
    line = waiting_line(job)
    if line is None:
        return None
    retry = f"Retry {job.num_retries} of {job.max_retries}. " if job.num_retries else ""
    is_first = line.position is None or line.position == 1
    turn = "" if is_first else f" It is number {line.position} in the queue."
    return f"{retry}{line.sentence}{turn}"


def scheduler_words(job: Job) -> str:
    """Return what a claimed job waits for in its host's scheduler: “Slurm: Resources”."""
    if job.state != JobState.STARTING or job.host is None:
        return ""
    reported = job.host.last_beat.get("attempts") or ()
    matching = [each for each in reported if each.get("attempt_id") == job.current_attempt_id]
    return str(matching[0].get("waits_for") or "") if matching else ""
