"""Look up jobs visible to a person; other teams' jobs answer 404."""

from django.db.models import QuerySet
from django.http import HttpRequest
from django.shortcuts import get_object_or_404

from webapp.jobs.models import Job


def visible_jobs(request: HttpRequest) -> QuerySet[Job]:
    """Return the jobs that the person may see, without deleted ones."""
    return Job.objects.visible_to(request.user).filter(deleted_at=None)


def load_job(request: HttpRequest, job_id: str) -> Job:
    """Return a visible job with its page's relations, or answer 404."""
    jobs = visible_jobs(request).select_related(
        "host", "requested_host", "pool", "owner", "plan", "current_attempt", "team"
    )
    return get_object_or_404(jobs, pk=job_id)
