"""What pages ask about jobs: above all why one is waiting."""

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
    turn = f" It is number {line.position} in the queue." if line.position > 1 else ""
    return f"{retry}{line.sentence}{turn}"


def scheduler_words(job: Job) -> str:
    """Return what a job that its host has claimed waits for elsewhere: “Slurm: Resources”."""
    if job.state != JobState.STARTING or job.host is None:
        return ""
    told = job.host.last_beat.get("attempts") or ()
    mine = [each for each in told if each.get("attempt_id") == job.current_attempt_id]
    return str(mine[0].get("waits_for") or "") if mine else ""
