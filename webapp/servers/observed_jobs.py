"""The observed server that an observed job is: the one at the address which the job's log says."""

from urllib.parse import urlsplit

from webapp.jobs.models import ObservedJob
from webapp.jobs.observed_jobs import report_of
from webapp.servers.models import ObservedServer


def server_of(job: ObservedJob) -> ObservedServer | None:
    """Return the team's observed server that a job serves as, None without one.

    It is at an address of the job's log, or at the same port of the job's host.
    """
    addresses = report_of(job).addresses
    if not addresses:
        return None
    rows = ObservedServer.objects.filter(team=job.team_id)
    if found := rows.filter(url__in=addresses).first():
        return found
    ports = {urlsplit(each).port for each in addresses}
    beside = (each for each in rows.filter(host=job.host_id) if urlsplit(each.url).port in ports)
    return next(beside, None)
