"""The list of jobs: filters in the query string, pages, live rows."""

from collections.abc import Collection

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_GET

from webapp.accounts.models import Membership, team_ids_of
from webapp.core.parameters import page_number, reads_query
from webapp.core.queries import NewestFirst, page_by_key
from webapp.hosts.models import RUNS_JOBS, Host
from webapp.jobs.listing import filter_jobs, list_rows, rows_of
from webapp.jobs.lookup import visible_jobs
from webapp.jobs.models import Job, JobState
from webapp.jobs.progress import KIND_WORDS
from webapp.live.stream import live_context, page_or_regions

PAGE_SIZE = 50
MOST_NAMED = 20  # values named where a filter has one that does not exist
FILTERS = ("state", "kind", "host", "owner", "q")


@require_GET
@reads_query(*FILTERS, "page")
def job_list(request: HttpRequest) -> HttpResponse:
    """List the teams' jobs, newest first, filtered by the query string."""
    keys = NewestFirst(filtered_jobs(request), "created_at", team_ids_of(request.user))
    page = page_by_key(keys, list_rows(), page_number(request), PAGE_SIZE)
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


def _hosts(request: HttpRequest) -> QuerySet[Host]:
    return Host.objects.visible_to(request.user).filter(kind__in=RUNS_JOBS)


def _owners(request: HttpRequest) -> list[str]:
    """Return possible job owners: the members of the person's teams."""
    teams = team_ids_of(request.user)
    members = Membership.objects.filter(team__in=teams).order_by("user__username")
    return list(members.values_list("user__username", flat=True).distinct())
