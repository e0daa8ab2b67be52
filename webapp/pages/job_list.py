"""The list of jobs: filters in the query string, pages, live rows."""

from collections.abc import Collection
from typing import NamedTuple

from django.db.models import DurationField, Expression, ExpressionWrapper, F, QuerySet
from django.db.models.expressions import OrderBy
from django.db.models.functions import Coalesce, Lower, Now
from django.http import HttpRequest, HttpResponse
from django.utils.http import urlencode
from django.views.decorators.http import require_GET

from webapp.accounts.models import Membership, team_ids_of
from webapp.core.parameters import choice_in_query, page_number, reads_query
from webapp.core.queries import InOrder, NewestFirst, page_by_key
from webapp.hosts.models import RUNS_JOBS, Host
from webapp.jobs.listing import filter_jobs, list_rows, rows_of
from webapp.jobs.lookup import visible_jobs
from webapp.jobs.models import LIVE_STATES, Job, JobState
from webapp.jobs.progress import KIND_WORDS
from webapp.live.stream import live_context, page_or_regions

PAGE_SIZE = 50
MOST_NAMED = 20  # values named where a filter has one that does not exist
FILTERS = ("state", "kind", "host", "owner", "q")
DURATION = Coalesce(F("ended_at"), Now()) - F("started_at")
SORTS: dict[str, Expression | F] = {  # columns of the list by their names in the query
    "created": F("created_at"),
    "name": Lower("name"),
    "started": F("started_at"),
    "duration": ExpressionWrapper(DURATION, DurationField()),
}
NEWEST = "-created"
LIVE = [state for state in JobState if state == JobState.QUEUED or state in LIVE_STATES]
FAILED = (JobState.FAILED, JobState.ERROR)


class Head(NamedTuple):
    """A column by which the list can be sorted: its direction now, and the query to turn it."""

    name: str
    direction: str  # of aria-sort, "" if the list is in another order
    query: str


@require_GET
@reads_query(*FILTERS, "sort", "page")
def job_list(request: HttpRequest) -> HttpResponse:
    """List the teams' jobs, filtered and sorted by the query string, else newest first."""
    sort = choice_in_query(request, "sort", [s + n for n in SORTS for s in ("", "-")]) or NEWEST
    page = page_by_key(_keys(request, sort), list_rows(), page_number(request), PAGE_SIZE)
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
        "heads": {name: _head(request, name, sort) for name in SORTS},
        "views": _views(request),
        "without_page": query.urlencode(),
        "states": _states(request.GET.get("state", "")),
        "kinds": KIND_WORDS.items(),
        "hosts": _hosts(request).values_list("slug", "name"),
        "owners": _owners(request),
    }
    context |= live_context(request, ["jobs"])
    return page_or_regions(request, "jobs/list.html", "jobs/_list.html", context)


def _keys(request: HttpRequest, sort: str) -> NewestFirst | InOrder:
    """Return the keys of the list in an order; the newest first are read from an index."""
    jobs = filtered_jobs(request)
    if sort == NEWEST:
        return NewestFirst(jobs, "created_at", team_ids_of(request.user))
    column = SORTS[sort.removeprefix("-")]
    is_descending = sort.startswith("-")
    return InOrder(jobs, OrderBy(column, descending=is_descending, nulls_last=True))


def _head(request: HttpRequest, name: str, sort: str) -> Head:
    """Return a column's head; a press sorts by it, another turns the order."""
    is_current = sort.removeprefix("-") == name
    is_descending = sort.startswith("-")
    turned = "" if is_descending else "-"
    usual = "" if name == "name" else "-"  # the latest and the longest come first
    direction = ("descending" if is_descending else "ascending") if is_current else ""
    return Head(name, direction, _query(request, sort=(turned if is_current else usual) + name))


def _query(request: HttpRequest, **changes: str) -> str:
    query = request.GET.copy()
    query.pop("page", None)
    for key, value in changes.items():
        query[key] = value
    return query.urlencode()


def _views(request: HttpRequest) -> list[tuple[str, str, bool]]:
    """Return the usual views of the list: words, query, whether it is shown now."""
    filters = {
        "All": {},
        "Mine": {"owner": request.user.get_username()},
        "Live": {"state": ",".join(LIVE)},
        "Failed": {"state": ",".join(FAILED)},
        "My failed": {"owner": request.user.get_username(), "state": ",".join(FAILED)},
    }
    now = {name: request.GET[name] for name in FILTERS if request.GET.get(name)}
    return [(words, urlencode(query), query == now) for words, query in filters.items()]


def _states(chosen: str) -> list[tuple[str, str]]:
    """Return the options of the filter by state, with the several of a view if one is shown."""
    labels: dict[str, str] = dict(JobState.choices)
    several = [each for each in _values("state", chosen) if each in labels]
    words = " or ".join(labels[each].lower() for each in several).capitalize()
    own = [(chosen, words)] if several and chosen not in labels else []
    return [*own, *labels.items()]


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
