"""Restart of an abandoned job on other hosts of its pool."""

from django.contrib.auth.models import User

from webapp.hosts.models import Host, HostState
from webapp.hosts.services import Contact, contact_of
from webapp.jobs.models import Job
from webapp.jobs.services import job_clone, job_submit

ANYWHERE = "pool"


def live_hosts(job: Job) -> list[Host]:
    """Return the hosts of the job's pool that can run it now."""
    hosts = Host.objects.filter(pool=job.pool_id, state=HostState.READY)
    return [host for host in hosts if contact_of(host) is Contact.LIVE]


def other_hosts(job: Job) -> list[Host]:
    """Return the other hosts on which a single-host job can be restarted."""
    return [] if job.num_hosts > 1 else [each for each in live_hosts(job) if each != job.host]


def is_enough(job: Job) -> bool:
    """Return whether a job on several hosts could restart without the unreachable ones."""
    return job.num_hosts > 1 and len(live_hosts(job)) >= job.num_hosts


def start_elsewhere(job: Job, place: str, owner: User) -> Job | None:
    """Queue a copy of an abandoned job on a host by id, or on the ``pool``; None if it cannot."""
    chosen = next((host for host in other_hosts(job) if host.pk == place), None)
    if chosen is None and not (place == ANYWHERE and is_enough(job)):
        return None
    copy = job_clone(job=job, owner=owner)
    copy.requested_host = chosen
    copy.save(update_fields=["requested_host"])
    return job_submit(job=copy, by=owner.get_username())
