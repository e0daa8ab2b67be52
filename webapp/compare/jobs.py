"""Which jobs an address asks to compare, and which letter and ink each of them has."""

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
    """One job of the comparison; its number chooses its ink, its letter names it in charts."""

    number: int  # from 1
    job: Job
    without_url: str  # the same comparison without it

    @property
    def letter(self) -> str:
        """Return the letter that stands for the job."""
        return LETTERS[self.number - 1]


def asked_ids(request: HttpRequest) -> list[str]:
    """Return the jobs that the address names, each once, in its order."""
    return list(dict.fromkeys(each for each in request.GET.getlist(PARAMETER) if each))


def address_of(ids: list[str]) -> str:
    """Return the address that compares these jobs."""
    query = "&".join(f"{PARAMETER}={each}" for each in ids)
    return f"{reverse('compare')}?{query}" if query else reverse("compare")


def asked_jobs(request: HttpRequest) -> list[Job]:
    """Return the jobs that the address names, in its order.

    Raises:
        Http404: one of them does not exist, as far as this person can see.
    """
    ids = asked_ids(request)
    rows = visible_jobs(request).filter(pk__in=ids[: MOST * 10])
    found = {
        job.pk: job
        for job in rows.select_related(
            "host__team", "requested_host", "pool", "owner", "plan", "current_attempt__host"
        )
    }
    if missing := [each for each in ids if each not in found]:
        raise Http404(missing[0])
    return [found[each] for each in ids]


def sides_of(jobs: list[Job]) -> list[Side]:
    """Return the jobs with their letters."""
    ids = [job.pk for job in jobs]
    return [
        Side(at + 1, job, address_of([each for each in ids if each != job.pk]))
        for at, job in enumerate(jobs)
    ]


def offered(request: HttpRequest, chosen: list[Job]) -> list[Job]:
    """Return the latest jobs to choose from, those most like a chosen one first."""
    latest = visible_jobs(request).exclude(pk__in=[job.pk for job in chosen])
    latest = latest.exclude(state=JobState.DRAFT)
    rows = latest.select_related("host", "requested_host", "pool", "owner", "current_attempt")
    found = list(rows[:NUM_OFFERED])
    if not chosen:
        return found
    like = chosen[0]
    return sorted(
        found,
        key=lambda job: (job.kind != like.kind, not job.plan_id or job.plan_id != like.plan_id),
    )
