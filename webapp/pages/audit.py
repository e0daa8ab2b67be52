"""The audit page for a team's admins, and its CSV export."""

import csv
import json
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import quote

from django.contrib.auth.models import User
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_GET

from webapp.accounts.models import Role
from webapp.accounts.services import current_team, require_role
from webapp.audit.models import Event, Link
from webapp.audit.reading import EXACT, filter_events, visible_events
from webapp.core.display import cell
from webapp.core.parameters import day_in_query, page_number, reads_query
from webapp.hosts.models import Host
from webapp.jobs.models import Job
from webapp.plans.models import Plan

PAGE_SIZE = 50
MOST_EXPORTED = 20_000
FILTERS = (*EXACT, "from", "to")
COLUMNS = ("at", "kind", "subject", "from_state", "to_state", "reason", "actor", "detail")


@require_GET
@require_role(Role.ADMIN)
@reads_query(*FILTERS, "page")
def audit_list(request: HttpRequest) -> HttpResponse:
    """Show the history of the team, newest first, filtered by the query string."""
    page = Paginator(filtered_events(request), PAGE_SIZE).get_page(page_number(request))
    query = request.GET.copy()
    query.pop("page", None)
    sealed = Link.objects.filter(event_id__in=[event.pk for event in page])
    context = {
        "page": page,
        "filters": request.GET,
        "query": query.urlencode(),
        "kinds": _kinds(request),
        "objects": _objects(page),
        "sealed": set(sealed.values_list("event_id", flat=True)),
        "most": MOST_EXPORTED,
    }
    response = render(request, "audit/list.html", context)
    response["Cache-Control"] = "no-store"
    return response


class Named(NamedTuple):
    """An object of an event: its name and its page."""

    name: str
    url: str


def _objects(events: Iterable[Event]) -> dict[str, Named]:
    """Return the jobs, plans, hosts and people of events that still exist, by their id."""
    ids = {event.subject for event in events if event.subject}
    jobs = Job.objects.filter(pk__in=ids, deleted_at=None).values_list("pk", "name")
    plans = Plan.objects.filter(pk__in=ids, deleted_at=None).values_list("pk", "name")
    hosts = Host.objects.filter(pk__in=ids).values_list("pk", "name", "slug")
    people = {key for key in ids if key.isascii() and key.isdigit()}
    users = User.objects.filter(pk__in=people).values_list("pk", "username")
    return {
        **{key: Named(name, reverse("job-detail", args=[key])) for key, name in jobs},
        **{key: Named(name or "plan", reverse("plan-detail", args=[key])) for key, name in plans},
        **{key: Named(name, reverse("host-detail", args=[slug])) for key, name, slug in hosts},
        **{
            str(key): Named(name, f"{reverse('audit')}?actor={quote(name)}") for key, name in users
        },
    }


@require_GET
@require_role(Role.ADMIN)
@reads_query(*FILTERS)
def audit_export(request: HttpRequest) -> HttpResponse:
    """Return the same rows as CSV, with cells escaped against formulas."""
    response = HttpResponse(content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = 'attachment; filename="audit.csv"'
    response["Cache-Control"] = "no-store"
    writer = csv.writer(response)
    writer.writerow(COLUMNS)
    for event in filtered_events(request)[:MOST_EXPORTED]:
        writer.writerow([cell(value) for value in _values(event)])
    return response


def _values(event: Event) -> list[str]:
    texts = [str(getattr(event, name)) for name in COLUMNS[1:-1]]
    return [event.at.isoformat(), *texts, json.dumps(event.detail, sort_keys=True)]


def _kinds(request: HttpRequest) -> list[str]:
    events = visible_events(current_team(request).pk, request.user)
    return sorted(events.order_by().values_list("kind", flat=True).distinct())


def filtered_events(request: HttpRequest) -> QuerySet[Event]:
    """Return the visible events that match the filters of the query string."""
    return filter_events(
        visible_events(current_team(request).pk, request.user),
        {name: request.GET.get(name, "").strip() for name in EXACT},
        first=day_in_query(request, "from"),
        last=day_in_query(request, "to"),
    )
