"""What pages ask about jobs: above all why one is waiting."""

from webapp.core.units import clock
from webapp.hosts.contact import Contact, contact_of, silent_seconds
from webapp.hosts.models import Host, HostState
from webapp.jobs.models import LIVE_STATES, Event, Job, JobState


def waiting_sentence(job: Job) -> str | None:
    """Return why a queued job has not started, in one sentence; None for any other job."""
    if job.state != JobState.QUEUED:
        return None
    host = job.requested_host
    if host is None:
        return _pool_sentence(job)
    return _host_sentence(host) or _busy_sentence(job, host) or _preflight_sentence(job)


def _pool_sentence(job: Job) -> str:
    hosts = "a host" if job.num_hosts == 1 else f"{job.num_hosts} hosts"
    return f"It waits until {hosts} of the pool {job.pool.name} have what it needs free."


def _host_sentence(host: Host) -> str | None:
    if host.state != HostState.READY:
        return f"{host.name} is {host.get_state_display().lower()} and takes no new jobs."
    contact = contact_of(host)
    if contact is Contact.UNKNOWN:
        return f"{host.name} has never reported."
    if contact is not Contact.LIVE:
        silent = silent_seconds(host) or 0.0
        return f"{host.name} has been silent for {clock(silent)}; the job starts when it is back."
    return None


def _busy_sentence(job: Job, host: Host) -> str | None:
    running = Job.objects.filter(host=host, state__in=LIVE_STATES).first()
    if running is None:
        return None
    ahead = Job.objects.filter(
        requested_host=host, state=JobState.QUEUED, deleted_at=None, queued_at__lt=job.queued_at
    ).count()
    whose = f"“{running.name}”" if running.team_id == job.team_id else "another job"
    waits = "waits" if ahead == 1 else "wait"
    queue = f", and {ahead} more {waits} before this one" if ahead else ""
    return f"{host.name} runs {whose}{queue}."


def _preflight_sentence(job: Job) -> str:
    failed = Event.objects.filter(
        kind="job.state",
        subject=job.pk,
        from_state=JobState.PREFLIGHT,
        to_state=JobState.QUEUED,
    ).last()
    if failed is None:
        return f"{job.place} is free; the job starts within seconds."
    sentences = [check["sentence"] for check in failed.detail.get("checks", []) if not check["ok"]]
    return "The last check failed and is tried again: " + " ".join(sentences)
