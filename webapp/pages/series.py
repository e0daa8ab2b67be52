"""What the pages of workflows and tunings have in common: the list, stop and delete."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect

from webapp.accounts.models import team_ids_of
from webapp.accounts.services import owned_for, signed_in
from webapp.core.parameters import page_number
from webapp.core.queries import NewestFirst, page_by_key
from webapp.jobs.series import JobSeries, series_delete
from webapp.live.stream import live_context, page_or_regions
from webapp.pages.acting import act

PAGE_SIZE = 20
S = TypeVar("S", bound=JobSeries)


def series_page(
    request: HttpRequest,
    rows: QuerySet[S],
    views_of: Callable[[list[S]], Sequence[object]],
    folder: str,
) -> HttpResponse:
    """List the teams' rows, the newest first, with the templates of a folder; it stays live."""
    teams = team_ids_of(request.user)
    keys = NewestFirst(rows.model.objects.filter(team__in=teams), "created_at", teams)
    page = page_by_key(keys, rows, page_number(request), PAGE_SIZE)
    context: dict[str, Any] = {"page": page, "views": views_of(list(page.object_list))}
    if context["views"]:
        context |= live_context(request, ["jobs"])
    return page_or_regions(request, f"{folder}/list.html", f"{folder}/_list.html", context)


def series_act(
    request: HttpRequest, model: type[S], pk: str, change: Callable[..., object], words: str
) -> HttpResponse:
    """Act on a row that the person may change, and say that it is done or why not."""
    series = owned_for(request, model, pk=pk)
    act(request, lambda: change(series, by=signed_in(request)), words)
    return redirect(f"{model._meta.model_name}-detail", series.pk)


def series_remove(request: HttpRequest, model: type[S], pk: str) -> HttpResponse:
    """Take an ended row out of the list."""
    series = owned_for(request, model, pk=pk)
    words = f"{series.title} is deleted; its jobs stay."
    if act(request, lambda: series_delete(series, by=signed_in(request)), words):
        return redirect(f"{model._meta.model_name}-list")
    return redirect(f"{model._meta.model_name}-detail", series.pk)
