"""The list of jobs, which is also the history: filters in the query string, pages, live rows."""

from dataclasses import dataclass

from django.core.paginator import Page, Paginator
from django.db.models import Prefetch, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_GET

from webapp.accounts.models import Membership
from webapp.hosts.models import RUNS_JOBS, Host
from webapp.jobs import figures
from webapp.jobs.actions import Allowed, allowed
from webapp.jobs.lookup import visible_jobs
from webapp.jobs.models import Job, JobState, Measurement
from webapp.live.page import live_context, page_or_regions

PAGE_SIZE = 50
FILTERS = ("state", "kind", "host", "owner", "q")


@dataclass(frozen=True)
class Row:
    """One line of the list."""

    job: Job
    kind: str
    progress: figures.Progress
    seconds: float
    ratio: float | None
    allowed: Allowed


@require_GET
def job_list(request: HttpRequest) -> HttpResponse:
    """List the teams' jobs, newest first, filtered by the query string."""
    jobs = visible_jobs(request)
    page = Paginator(filtered(jobs, request), PAGE_SIZE).get_page(request.GET.get("page"))
    memberships = Membership.objects.filter(user__username=request.user.get_username())
    members = {row.team_id: row for row in memberships}
    is_filtered = any(request.GET.get(name) for name in FILTERS)
    context = {
        "page": page,
        "rows": rows_of(page, members),
        "is_filtered": is_filtered,
        "is_empty": not is_filtered and not page.paginator.count,
        "asked": request.GET,
        "without_page": _without_page(request),
        "states": JobState.choices,
        "kinds": figures.KIND_WORDS.items(),
        "hosts": Host.objects.visible_to(request.user).filter(kind__in=RUNS_JOBS),
        "owners": _owners(jobs),
    }
    context |= live_context(request, ["jobs"])
    return page_or_regions(request, "jobs/list.html", "jobs/_list.html", context)


def filtered(jobs: QuerySet[Job], request: HttpRequest) -> QuerySet[Job]:
    """Return the jobs that match the query string's filters, ready for a page."""
    asked = {name: request.GET.get(name, "").strip() for name in FILTERS}
    exact = {
        "state": asked["state"],
        "kind": asked["kind"],
        "owner__username": asked["owner"],
    }
    jobs = jobs.filter(**{field: value for field, value in exact.items() if value})
    if slug := asked["host"]:
        jobs = jobs.filter(Q(host__slug=slug) | Q(host=None, requested_host__slug=slug))
    if text := asked["q"]:
        jobs = jobs.filter(Q(name__icontains=text) | Q(model_name__icontains=text))
    measured = Prefetch(
        "measurements", queryset=Measurement.objects.only("job", "metric", "ratio")
    )
    return jobs.select_related("host", "requested_host", "pool", "owner").prefetch_related(
        measured
    )


def rows_of(page: Page[Job], members: dict[str, Membership]) -> list[Row]:
    """Return the lines of one page."""
    return [
        Row(
            job,
            figures.KIND_WORDS.get(job.kind, job.kind),
            figures.progress(job),
            figures.elapsed_seconds(job),
            figures.main_ratio(job.measurements.all()),
            allowed(members.get(job.team_id), job),
        )
        for job in page
    ]


def _owners(jobs: QuerySet[Job]) -> list[str]:
    names = jobs.order_by("owner__username").values_list("owner__username", flat=True).distinct()
    return [name for name in names if name]


def _without_page(request: HttpRequest) -> str:
    query = request.GET.copy()
    query.pop("page", None)
    return query.urlencode()
