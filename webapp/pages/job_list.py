"""The list of jobs: filters in the query string, pages, live rows."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from django.contrib.auth.models import User
from django.core.paginator import Page
from django.db.models import Prefetch, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_GET

from webapp.accounts.models import Membership, team_ids_of
from webapp.core.parameters import page_number, reads_query
from webapp.core.queries import NewestFirst, page_by_key
from webapp.hosts.models import RUNS_JOBS, Host
from webapp.jobs.lookup import visible_jobs
from webapp.jobs.models import Attempt, Job, JobState, Measurement
from webapp.jobs.permissions import AllowedActions, allowed
from webapp.jobs.progress import KIND_WORDS, Progress, elapsed_seconds, main_ratio, progress
from webapp.live.stream import live_context, page_or_regions

PAGE_SIZE = 50
MOST_NAMED = 20  # values named where a filter has one that does not exist
MOST_PARTS = 100  # newest gang attempts searched for a host's jobs
FILTERS = ("state", "kind", "host", "owner", "q")
OF_JOB = (
    "team", "kind", "name", "model_name", "state", "num_hosts", "progress_done",
    "progress_total", "progress_unit", "progress_at", "eta_seconds", "phase", "created_at",
    "started_at", "ended_at", "current_attempt",
)  # fmt: skip
OF_HOST = ("name", "slug", "state", "kind", "contact", "last_seen_at")
SHOWN = (
    *OF_JOB, "owner__username", "pool__name",
    *(f"{host}__{field}" for host in ("host", "requested_host") for field in OF_HOST),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the list."""

    job: Job
    kind: str
    progress: Progress
    seconds: float
    ratio: float | None
    allowed: AllowedActions


@require_GET
@reads_query(*FILTERS, "page")
def job_list(request: HttpRequest) -> HttpResponse:
    """List the teams' jobs, newest first, filtered by the query string."""
    keys = NewestFirst(filtered_jobs(request), "created_at", team_ids_of(request.user))
    page = page_by_key(keys, _rows(), page_number(request), PAGE_SIZE)
    memberships = Membership.objects.filter(user__username=request.user.get_username())
    members = {row.team_id: row for row in memberships}
    is_filtered = any(request.GET.get(name) for name in FILTERS)
    query = request.GET.copy()
    query.pop("page", None)
    context = {
        "page": page,
        "rows": rows_of(page, members),
        "is_filtered": is_filtered,
        "unknown": unknown_values(request, KIND_WORDS, _owners(request)),
        "is_empty": not is_filtered and not page.paginator.count,
        "filters": request.GET,
        "without_page": query.urlencode(),
        "states": JobState.choices,
        "kinds": KIND_WORDS.items(),
        "hosts": _hosts(request).values_list("slug", "name"),
        "owners": _owners(request),
    }
    context |= live_context(request, ["jobs"])
    return page_or_regions(request, "jobs/list.html", "jobs/_list.html", context)


def unknown_values(
    request: HttpRequest, kinds: Collection[str], owners: Collection[str]
) -> list[str]:
    """Return a sentence for each filter whose value does not exist, with the values that do."""
    hosts = list(_hosts(request).values_list("slug", flat=True))
    known = {"state": JobState.values, "kind": kinds, "host": hosts, "owner": owners}
    listed = {name: ", ".join(list(values)[:MOST_NAMED]) for name, values in known.items()}
    return [
        f"There is no {name} “{value[:40]}”; there are {listed[name] or 'none'}."
        for name, values in known.items()
        for value in _values(name, request.GET.get(name, ""))
        if value not in values
    ]


def _values(name: str, text: str) -> list[str]:
    parts = text.split(",") if name == "state" else [text]
    return [part.strip() for part in parts if part.strip()]


def filtered_jobs(request: HttpRequest) -> QuerySet[Job]:
    """Return the visible jobs that match the query string's filters."""
    filters = {name: request.GET.get(name, "").strip() for name in FILTERS}
    return filter_jobs(visible_jobs(request), filters)


def filter_jobs(jobs: QuerySet[Job], filters: Mapping[str, str]) -> QuerySet[Job]:
    """Return the jobs that match filters by name; an empty one matches every job.

    ``state`` may name several, separated by commas; ``host`` is a slug, ``owner`` a user name,
    ``q`` a part of the name of the job or of its model.
    """
    if states := filters.get("state"):
        jobs = jobs.filter(state__in=[name.strip() for name in states.split(",")])
    for field in ("kind", "plan"):
        if value := filters.get(field):
            jobs = jobs.filter(**{field: value})
    if name := filters.get("owner"):  # by key: the list's index contains it
        owner = User.objects.filter(username=name).values_list("pk", flat=True).first()
        jobs = jobs.filter(owner_id=owner) if owner else jobs.none()
    if slug := filters.get("host"):
        host = Host.objects.filter(slug=slug).values_list("pk", flat=True).first()
        here = Q(host_id=host) | Q(host_id=None, requested_host_id=host)
        jobs = jobs.filter(here) if host else jobs.none()
    if text := filters.get("q"):
        jobs = jobs.filter(Q(name__folded_contains=text) | Q(model_name__folded_contains=text))
    return jobs


def latest_at(request: HttpRequest, host: Host, number: int) -> list[Job]:
    """Return a host's newest visible jobs, running, ended or queued, including gang parts."""
    jobs = visible_jobs(request)
    newest = jobs.order_by("-created_at", "-id").values_list("pk", flat=True)
    own = newest.filter(host_id=host.pk)[:number]
    queued = newest.filter(host_id=None, requested_host_id=host.pk)[:number]
    parts = Attempt.objects.filter(host=host, leader__isnull=False).order_by("-id")
    keys = {*own, *queued, *parts.values_list("job_id", flat=True)[:MOST_PARTS]}
    candidates = (
        jobs.filter(pk__in=keys).order_by("-created_at", "-id").values_list("pk", flat=True)
    )
    rows = _rows().in_bulk(list(candidates[:number]))
    return sorted(rows.values(), key=lambda job: (job.created_at, job.pk), reverse=True)


def _rows() -> QuerySet[Job]:
    """Return jobs with the columns of a list row, without large documents."""
    measured = Prefetch(
        "measurements", queryset=Measurement.objects.only("job", "metric", "ratio")
    )
    jobs = Job.objects.select_related("host", "requested_host", "pool", "owner")
    return jobs.only(*SHOWN).prefetch_related(measured)


def rows_of(page: Page[Job], members: dict[str, Membership]) -> list[Row]:
    """Return the lines of one page."""
    return [
        Row(
            job,
            KIND_WORDS.get(job.kind, job.kind),
            progress(job),
            elapsed_seconds(job),
            main_ratio(job.measurements.all()),
            allowed(members.get(job.team_id), job),
        )
        for job in page
    ]


def _hosts(request: HttpRequest) -> QuerySet[Host]:
    return Host.objects.visible_to(request.user).filter(kind__in=RUNS_JOBS)


def _owners(request: HttpRequest) -> list[str]:
    """Return possible job owners: the members of the person's teams."""
    teams = team_ids_of(request.user)
    members = Membership.objects.filter(team__in=teams).order_by("user__username")
    return list(members.values_list("user__username", flat=True).distinct())
