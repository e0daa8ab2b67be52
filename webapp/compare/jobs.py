"""The jobs of a comparison, from its URL, with their letters and colours."""

from dataclasses import dataclass

from django.http import Http404, HttpRequest
from django.urls import reverse

from webapp.jobs.lookup import visible_jobs
from webapp.jobs.models import Job, JobState

PARAMETER = "job"
FEWEST, MOST = 2, 4
LETTERS = "ABCD"
NUM_OFFERED = 30


@dataclass(frozen=True)
class Side:
    """One job of the comparison; its number selects its colour, its letter labels it."""

    number: int  # from 1
    job: Job
    without_url: str  # the comparison without this job

    @property
    def letter(self) -> str:
        """Return the letter of the job."""
        return LETTERS[self.number - 1]


def requested_ids(request: HttpRequest) -> list[str]:
    """Return the job ids in the URL without duplicates, in order."""
    return list(dict.fromkeys(each for each in request.GET.getlist(PARAMETER) if each))


def address_of(ids: list[str]) -> str:
    """Return the URL of the comparison of these jobs."""
    query = "&".join(f"{PARAMETER}={each}" for each in ids)
    return f"{reverse('compare')}?{query}" if query else reverse("compare")


def requested_jobs(request: HttpRequest) -> list[Job]:
    """Return the jobs in the URL, in order.

    Raises:
        Http404: one of them does not exist or is not visible to the user.
    """
    ids = requested_ids(request)
    rows = visible_jobs(request).filter(pk__in=ids[: MOST * 10])
    by_id = {
        job.pk: job
        for job in rows.select_related(
            "host__team", "requested_host", "pool", "owner", "plan", "current_attempt__host"
        )
    }
    if missing := [each for each in ids if each not in by_id]:
        raise Http404(missing[0])
    return [by_id[each] for each in ids]


def sides_of(jobs: list[Job]) -> list[Side]:
    """Return the sides of the comparison."""
    ids = [job.pk for job in jobs]
    return [
        Side(at + 1, job, address_of([each for each in ids if each != job.pk]))
        for at, job in enumerate(jobs)
    ]


def offered(request: HttpRequest, chosen: list[Job]) -> list[Job]:
    """Return the latest jobs to choose from, those similar to the first chosen one first."""
    latest = visible_jobs(request).exclude(pk__in=[job.pk for job in chosen])
    latest = latest.exclude(state=JobState.DRAFT)
    rows = latest.select_related("host", "requested_host", "pool", "owner", "current_attempt")
    latest_jobs = list(rows[:NUM_OFFERED])
    if not chosen:
        return latest_jobs
    reference = chosen[0]
    return sorted(
        latest_jobs,
        key=lambda job: (
            job.kind != reference.kind,
            not job.plan_id or job.plan_id != reference.plan_id,
        ),
    )
