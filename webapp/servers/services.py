"""Add, change and remove observed servers: operators of the team do, every member looks."""

from typing import NamedTuple
from urllib.parse import urlsplit

from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.db import IntegrityError, transaction
from django.http import HttpRequest
from django.views.decorators.debug import sensitive_variables

from runners.jobspec.base import NAME_LENGTH
from webapp.accounts.models import Role, Team
from webapp.accounts.services import has_role, visible_or_404
from webapp.audit.models import event_record
from webapp.core.names import checked_name
from webapp.core.problems import ConflictProblem, InvalidProblem, NotFoundProblem
from webapp.hosts.models import Host
from webapp.metrics.store import forget
from webapp.plans.models import Plan, PlanState
from webapp.servers.keys import sealed_key
from webapp.servers.models import MOST_URL, ObservedServer

MOST_SERVERS = 100  # of a team
EXAMPLE = "http://10.0.0.5:8000"


class ServerLinks(NamedTuple):
    """What of the team an observed server is named with."""

    plan: Plan | None = None
    host: Host | None = None


def _invalid(field: str, message: str) -> InvalidProblem:
    return InvalidProblem(field, message, errors=[{"field": field, "message": message}])


def checked_url(text: str) -> str:
    """Return a server's address as it is stored: without ``/v1`` and a last slash.

    Raises:
        InvalidProblem: it is no address of a server.
    """
    url = text.strip()
    try:
        parts = urlsplit(url)
        named_port = parts.port
    except ValueError:
        raise _invalid("url", f"{url[:80]!r} is no address. Give one such as {EXAMPLE}.") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise _invalid(
            "url", f"{url[:80]!r} is no address of a web server. Give one such as {EXAMPLE}."
        )
    if parts.username is not None or parts.password is not None:
        raise _invalid(
            "url",
            "The address holds a user or a password, which everybody of the team would see. Give "
            "the key in its own field.",
        )
    if parts.query or parts.fragment or named_port == 0 or not url.isprintable() or " " in url:
        raise _invalid("url", f"Give the address alone, up to its path, such as {EXAMPLE}.")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    found = f"{parts.scheme}://{parts.netloc.lower()}{path}"
    if len(found) > MOST_URL:
        raise _invalid("url", f"The address has {len(found)} characters; it may have {MOST_URL}.")
    return found


def check_links(team: Team, links: ServerLinks) -> None:
    """Check that a plan and a host are the team's, and that the plan serves.

    Raises:
        InvalidProblem: one of them cannot stand beside a server.
    """
    plan, host = links.plan, links.host
    if plan is not None:
        if plan.team_id != team.pk or plan.deleted_at is not None:
            raise _invalid("plan", "Your team has no such plan.")
        if plan.state != PlanState.COMPUTED or plan.document.goal != "serve":
            raise _invalid("plan", "Name a saved plan whose goal is to serve a model.")
    if host is not None and host.team_id != team.pk:
        raise _invalid("host", "Your team has no such host.")


@sensitive_variables("key")
def server_add(
    *, team: Team, by: User, url: str, name: str, links: ServerLinks, key: str = ""
) -> ObservedServer:
    """Watch a server from now on; without a name it has that of its address.

    Raises:
        InvalidProblem: a field is not valid, or the address gives no name that is free.
        ConflictProblem: the name is taken, the address is watched already, or there are too many.
        VaultError: the key cannot be encrypted.
    """
    address = checked_url(url)
    given = checked_name(name, "name")[:NAME_LENGTH]
    shown = given or urlsplit(address).netloc[:NAME_LENGTH]
    check_links(team, links)
    sealed = sealed_key(team.pk, address, key)
    with transaction.atomic():
        Team.objects.select_for_update(no_key=True).get(pk=team.pk)  # one after the other
        rows = ObservedServer.objects.filter(team=team)
        if (other := rows.filter(url=address).first()) is not None:
            raise ConflictProblem("url", f"{other.name} watches {address} already.")
        if rows.count() >= MOST_SERVERS:
            raise ConflictProblem(
                "too_many",
                f"Your team watches {MOST_SERVERS} servers, the most. Remove one first.",
            )
        if rows.filter(name=shown).exists():
            if given:
                raise _taken(shown)
            raise _invalid(
                "name", f"Another server is named {shown} after its address: give this one a name."
            )
        row: ObservedServer = ObservedServer.objects.create(
            team=team, owner=by, url=address, name=shown, sealed_key=sealed, **links._asdict()
        )
        detail = {"name": shown, "url": address, "key": bool(key)}
        event_record(row, "server.added", by.get_username(), detail=detail)
    return row


def _taken(name: str) -> ConflictProblem:
    return ConflictProblem("name", f"A server of your team is named {name} already.")


@sensitive_variables("key")
def server_change(
    *, server: ObservedServer, by: User, name: str, links: ServerLinks, key: str | None = None
) -> ObservedServer:
    """Change what a server is called and what stands beside it; its points stay.

    ``key`` None is as it is, and "" is none. Its address stays: a server at another one is another
    server, which is added with its own key.

    Raises:
        InvalidProblem: a field that changes is not valid.
        ConflictProblem: the name is taken.
        VaultError: the key cannot be encrypted.
    """
    wanted = {"name": checked_name(name, "name")[:NAME_LENGTH] or server.name, **links._asdict()}
    changed = {field: value for field, value in wanted.items() if value != getattr(server, field)}
    check_links(
        server.team,
        ServerLinks(*(changed.get(field) for field in ServerLinks._fields)),
    )
    detail: dict[str, object] = {
        field: getattr(value, "pk", value) for field, value in changed.items()
    }
    if key or (key is not None and server.has_key):
        changed["sealed_key"] = sealed_key(server.team_id, server.url, key)
        detail["key"] = bool(key)
        changed |= {"looked_at": None, "silent_since": None, "problem": ""}
    if not changed:
        return server
    try:
        with transaction.atomic():
            ObservedServer.objects.filter(pk=server.pk).update(**changed)
            event_record(server, "server.changed", by.get_username(), detail=detail)
    except IntegrityError:
        raise _taken(str(wanted["name"])) from None
    server.refresh_from_db()
    return server


def server_remove(*, server: ObservedServer, by: User) -> None:
    """Watch a server no longer, and delete its points; the server itself is left alone.

    Raises:
        NotFoundProblem: another call has removed it.
    """
    with transaction.atomic():
        deleted, _ = ObservedServer.objects.filter(pk=server.pk).delete()
        if not deleted:
            raise NotFoundProblem("gone", f"{server.name} is removed already.")
        detail = {"name": server.name, "url": server.url}
        event_record(server, "server.removed", by.get_username(), detail=detail)
    forget(server.pk)


def visible_server(request: HttpRequest, server_id: str) -> ObservedServer:
    """Return a server of the person's teams, else raise Http404."""
    return visible_or_404(ObservedServer, request.user, pk=server_id)


def server_for(request: HttpRequest, server_id: str) -> ObservedServer:
    """Return a server for one of its team's operators.

    Raises:
        PermissionDenied: the person is not an operator.
    """
    row = visible_server(request, server_id)
    if not has_role(request.user, row.team, Role.OPERATOR):
        raise PermissionDenied(
            "Only operators change observed servers. An admin of your team can give you the role."
        )
    return row
