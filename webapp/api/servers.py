"""Operations on observed servers: those that somebody else started."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from django.http import HttpRequest
from django.urls import reverse
from ninja import Query, Router, Status
from pydantic import Field

from runners.client.replies.servers import (
    ServedModelReply,
    ServerDetail,
    ServerFigure,
    ServerPage,
    ServerReply,
    ServerWindow,
)
from runners.jobspec.base import NAME_LENGTH
from webapp.accounts.models import Role, Team, team_ids_of
from webapp.accounts.services import check_role, current_membership, signed_in
from webapp.api.auth import ADMIN, READ
from webapp.api.requests import Paging, Sent, page_keys
from webapp.core.problems import REFUSALS, InvalidProblem, UnavailableProblem
from webapp.core.queries import in_order
from webapp.core.vault import VaultError
from webapp.hosts.models import Host
from webapp.plans.models import Plan
from webapp.servers.comparing import compare_with_plan
from webapp.servers.figures import Window
from webapp.servers.keys import LONGEST_KEY
from webapp.servers.models import MOST_URL, ObservedServer
from webapp.servers.services import (
    EXAMPLE,
    ServerLinks,
    server_add,
    server_change,
    server_for,
    server_remove,
    visible_server,
)

router = Router(tags=["servers"], auth=READ)
Name = Annotated[str, Field(max_length=NAME_LENGTH, description="Empty: its address")]
Key = Annotated[
    str,
    Field(
        max_length=LONGEST_KEY,
        description="Its key, for this address alone; stored encrypted, never returned",
    ),
]
PlanId = Annotated[str | None, Field(description="Id of a saved plan; null: none")]
HostSlug = Annotated[str | None, Field(description="Slug of a host; null: none")]


class NewServer(Sent):
    """A server to watch."""

    address: Annotated[
        str, Field(max_length=MOST_URL, description=f"Such as {EXAMPLE}, with or without /v1")
    ]
    name: Name = ""
    key: Key = ""
    plan: PlanId = None
    host: HostSlug = None


class ChangedServer(Sent):
    """What is to change; a field that is left out stays."""

    name: Annotated[
        str | None, Field(max_length=NAME_LENGTH, description="Empty or null: as it is")
    ] = None
    key: Annotated[
        str | None,
        Field(max_length=LONGEST_KEY, description="Another key; empty: none; null: as it is"),
    ] = None
    plan: PlanId = None
    host: HostSlug = None


def _reply(row: ObservedServer) -> dict[str, Any]:
    return {
        "id": row.pk,
        "name": row.name,
        "address": row.url,
        "team": row.team_id,
        "owner": row.owner.get_username() if row.owner else "",
        "has_key": row.has_key,
        "plan": row.plan_id,
        "host": row.host.slug if row.host else "",
        "created_at": row.created_at,
        "state": row.state,
        "engine": row.engine,
        "release": row.release,
        "models": [ServedModelReply(**each) for each in row.served_models],
        "looked_at": row.looked_at,
        "answered_at": row.answered_at,
        "silent_since": row.silent_since,
        "problem": row.problem,
        "figures": row.figures,
        "window": ServerWindow(**Window.model_validate(row.window or {}).model_dump()),
        "url": reverse("server-detail", args=[row.pk]),
    }


def _detail(row: ObservedServer) -> ServerDetail:
    compared = compare_with_plan(row)
    rows = compared.rows if compared else ()
    return ServerDetail(
        **_reply(row),
        compared=[
            ServerFigure(
                name=each.name,
                measured=compared.window.figures[each.name] if compared else 0.0,
                predicted=each.predicted.value if each.predicted else None,
                low=each.predicted.low if each.predicted else None,
                high=each.predicted.high if each.predicted else None,
                note=each.note,
            )
            for each in rows
        ],
        compared_concurrency=compared.load.concurrency if compared and compared.load else None,
    )


def _links(
    request: HttpRequest, team: Team, given: dict[str, Any], old: ServerLinks
) -> ServerLinks:
    """Return what stands beside a server: as given, and as before where nothing is."""
    plan, host = old.plan, old.host
    if "plan" in given:
        named = given["plan"]
        rows = Plan.objects.visible_to(request.user).filter(team=team)
        plan = rows.filter(pk=named).first() if named else None
        if named and plan is None:
            raise _unknown("plan", named)
    if "host" in given:
        named = given["host"]
        machines = Host.objects.visible_to(request.user).filter(team=team)
        host = machines.filter(slug=named).first() if named else None
        if named and host is None:
            raise _unknown("host", named)
    return ServerLinks(plan, host)


def _unknown(field: str, named: str) -> InvalidProblem:
    message = f"Your team has no {field} {named[:40]!r}."
    return InvalidProblem(field, message, errors=[{"field": field, "message": message}])


@contextmanager
def _keeping_keys() -> Iterator[None]:
    """Answer that the vault is not available, if a key cannot be encrypted."""
    try:
        yield
    except VaultError as error:
        raise UnavailableProblem("vault", str(error), retry_after_seconds=60) from error


@router.get("/servers", response={200: ServerPage, **REFUSALS}, operation_id="list_servers")
def server_list(request: HttpRequest, paging: Query[Paging]) -> ServerPage:
    """Return the teams' observed servers, the newest first."""
    teams = team_ids_of(request.user)
    rows = ObservedServer.objects.filter(team__in=teams)
    listed = page_keys(rows, "created_at", teams, paging)
    found = in_order(ObservedServer.objects.select_related("owner", "host"), listed.keys)
    return ServerPage(
        items=[ServerReply(**_reply(each)) for each in found], next_cursor=listed.next_cursor
    )


@router.post(
    "/servers", auth=ADMIN, response={201: ServerDetail, **REFUSALS}, operation_id="add_server"
)
def server_make(request: HttpRequest, body: NewServer) -> Status[ServerDetail]:
    """Watch a server that somebody else started; nothing of it is changed."""
    membership = current_membership(request)
    check_role(Role(membership.role), Role.OPERATOR)
    given = body.model_dump()
    links = _links(request, membership.team, given, ServerLinks())
    with _keeping_keys():
        row = server_add(
            team=membership.team,
            by=signed_in(request),
            url=body.address,
            name=body.name,
            links=links,
            key=body.key,
        )
    return Status(201, _detail(row))


@router.get(
    "/servers/{server_id}", response={200: ServerDetail, **REFUSALS}, operation_id="get_server"
)
def server_get(request: HttpRequest, server_id: str) -> ServerDetail:
    """Return an observed server, as of the last look, with what its plan says."""
    return _detail(visible_server(request, server_id))


@router.patch(
    "/servers/{server_id}",
    auth=ADMIN,
    response={200: ServerDetail, **REFUSALS},
    operation_id="change_server",
)
def server_edit(request: HttpRequest, server_id: str, body: ChangedServer) -> ServerDetail:
    """Change what a server is called and what stands beside it."""
    row = server_for(request, server_id)
    given = body.model_dump(exclude_unset=True)
    links = _links(request, row.team, given, ServerLinks(row.plan, row.host))
    with _keeping_keys():
        changed = server_change(
            server=row,
            by=signed_in(request),
            name=given.get("name") or row.name,
            links=links,
            key=body.key,
        )
    return _detail(changed)


@router.delete(
    "/servers/{server_id}",
    auth=ADMIN,
    response={204: None, **REFUSALS},
    operation_id="remove_server",
)
def server_delete(request: HttpRequest, server_id: str) -> Status[None]:
    """Watch a server no longer, and delete its points; the server runs on."""
    server_remove(server=server_for(request, server_id), by=signed_in(request))
    return Status(204, None)
