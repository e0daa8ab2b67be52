"""The pages of observed servers: the list with a form, and one with its figures and charts."""

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_POST

from webapp.accounts.models import Role, team_ids_of
from webapp.accounts.services import (
    current_role,
    current_team,
    has_role,
    is_at_least,
    require_role,
    signed_in,
)
from webapp.core.clock import now_ms
from webapp.core.parameters import choice_in_query, page_number, reads_query
from webapp.core.queries import NewestFirst, page_by_key
from webapp.live.stream import live_context, page_or_regions
from webapp.pages.acting import act, save_by_form
from webapp.servers.comparing import compare_with_plan
from webapp.servers.engines import BY_NAME
from webapp.servers.forms import ServerForm
from webapp.servers.looking import EVERY_SECONDS, topic
from webapp.servers.models import ObservedServer
from webapp.servers.planning import command_of, planned_as
from webapp.servers.server_charts import DEFAULT_SPAN, SPANS, draw, points_of
from webapp.servers.services import (
    server_add,
    server_change,
    server_for,
    server_remove,
    visible_server,
)

PAGE_SIZE = 50
UNPROCESSABLE = 422
READ_WITH = ("owner", "plan", "host", "team")


@require_GET
@reads_query("page")
def server_list(request: HttpRequest) -> HttpResponse:
    """List the teams' observed servers; operators also get a form to add one."""
    return _list(request)


def _list(request: HttpRequest, form: ServerForm | None = None) -> HttpResponse:
    teams = team_ids_of(request.user)
    keys = NewestFirst(ObservedServer.objects.filter(team__in=teams), "created_at", teams)
    shown = ObservedServer.objects.select_related(*READ_WITH)
    page = page_by_key(keys, shown, page_number(request), PAGE_SIZE)
    servers = list(page.object_list)
    may_add = is_at_least(current_role(request), Role.OPERATOR)
    context: dict[str, Any] = {
        "page": page,
        "servers": [(each, BY_NAME.get(each.engine)) for each in servers],
        "form": (form or ServerForm(current_team(request))) if may_add else None,
    }
    if servers and form is None:
        context |= live_context(request, [topic(each.pk) for each in servers])
    response = page_or_regions(request, "servers/list.html", "servers/_list.html", context)
    response.status_code = UNPROCESSABLE if form is not None else response.status_code
    return response


@sensitive_post_parameters("key")
@require_POST
@require_role(Role.OPERATOR)
def server_save(request: HttpRequest) -> HttpResponse:
    """Watch a server from now on; what is refused shows the form again."""
    form = ServerForm(current_team(request), request.POST)
    return save_by_form(
        request,
        form,
        lambda: server_add(
            team=current_team(request),
            by=signed_in(request),
            url=form.cleaned_data["url"],
            name=form.cleaned_data["name"],
            links=form.links,
            key=form.new_key or "",
        ),
        lambda: _list(request, form),
        words=f"{{row}} is watched; its first look is within {EVERY_SECONDS:g} s.",
        page="server-detail",
    )


@require_GET
@reads_query("span", "since")
def server_detail(request: HttpRequest, server_id: str) -> HttpResponse:
    """Show a server: its models and figures, its charts, and what its plan says beside them."""
    return _detail(request, visible_server(request, server_id))


def _detail(
    request: HttpRequest, row: ObservedServer, form: ServerForm | None = None
) -> HttpResponse:
    span = choice_in_query(request, "span", tuple(SPANS)) or DEFAULT_SPAN
    drawn = draw(row, span)
    may_change = has_role(request.user, row.team, Role.OPERATOR)
    address = reverse("server-detail", args=[row.pk])
    is_page = request.headers.get("HX-Request") != "true"  # not its live regions alone
    context: dict[str, Any] = {
        "server": row,
        "engine": BY_NAME.get(row.engine),
        "comparison": compare_with_plan(row),
        "charts": drawn,
        "span_words": SPANS[span][0],
        "spans": [
            {"name": words, "url": f"{address}?span={key}", "is_current": key == span}
            for key, (words, _) in SPANS.items()
        ],
        "command": "" if row.plan and row.plan.deleted_at is None else command_of(row),
        "planned_as": planned_as(row),
        "may_change": may_change,
        "may_plan": has_role(request.user, row.team, Role.PRACTITIONER),
        "form": form or (ServerForm(row.team, server=row) if may_change and is_page else None),
        "every_seconds": EVERY_SECONDS,
        "as_of_ms": now_ms(),
        "points": _fresh(request, row, drawn),
    }
    if form is None:
        context |= live_context(request, [topic(row.pk)])
    response = page_or_regions(request, "servers/detail.html", "servers/_regions.html", context)
    response.status_code = UNPROCESSABLE if form is not None else response.status_code
    return response


def _fresh(request: HttpRequest, row: ObservedServer, drawn: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return the points of the charts since ``?since=``, for charts that are drawn already."""
    since = request.GET.get("since", "")
    if not (since.isascii() and since.isdigit() and len(since) <= len(str(2**53))):
        return None
    return points_of(row, drawn, int(since))


@sensitive_post_parameters("key")
@require_POST
def server_edit(request: HttpRequest, server_id: str) -> HttpResponse:
    """Change a server's name, or what stands beside it; what is refused shows the form again."""
    row = server_for(request, server_id)
    form = ServerForm(row.team, request.POST, server=row)
    return save_by_form(
        request,
        form,
        lambda: server_change(
            server=row,
            by=signed_in(request),
            name=form.cleaned_data["name"],
            links=form.links,
            key=form.new_key,
        ),
        lambda: _detail(request, row, form),
        words="{row} is changed.",
        page="server-detail",
    )


@require_POST
def server_delete(request: HttpRequest, server_id: str) -> HttpResponse:
    """Watch a server no longer; the server itself is left alone."""
    row = server_for(request, server_id)
    words = f"{row.name} is watched no longer; it runs on untouched."
    act(request, lambda: server_remove(server=row, by=signed_in(request)), words)
    return redirect("server-list")
