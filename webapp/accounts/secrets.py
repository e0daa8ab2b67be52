"""A team's secrets: written once, never shown again, passed to jobs by name."""

import json
import re
from collections.abc import Iterable
from datetime import datetime

from django.contrib import messages
from django.contrib.auth.models import User
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.debug import sensitive_post_parameters, sensitive_variables
from django.views.decorators.http import require_GET, require_POST

from runners.datasets.text import unix_lines
from webapp.accounts.models import Role, Secret, Team
from webapp.accounts.services import (
    check_role,
    current_role,
    current_team,
    is_at_least,
    membership_of,
    require_role,
    signed_in,
    visible_or_404,
)
from webapp.core import vault
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, InvalidProblem, Problem
from webapp.core.queries import SEEN, changed_words
from webapp.core.vault import VaultError

NAME = re.compile(r"[A-Z][A-Z0-9_]{1,39}")
SHORTEST, LONGEST = 8, 16_384  # masking shorter values would damage logs


@sensitive_variables("value")
def secret_store(*, team: Team, name: str, value: str, by: User, seen: str = "") -> Secret:
    """Encrypt and store a value under a name of the team, replacing an earlier one.

    ``seen`` is the instant, as ISO text, at which the page was opened.

    Raises:
        InvalidProblem: the name or the value is invalid.
        ConflictProblem: somebody stored another value under the name since then.
    """
    _check(name, value)
    document = json.dumps({"team": team.pk, "name": name, "value": value})
    with transaction.atomic():
        existing = Secret.objects.select_for_update(no_key=True).filter(team=team, name=name)
        if (other := existing.select_related(None).first()) is not None:
            _refuse_newer(other, seen, by)
        secret: Secret = Secret.objects.update_or_create(
            team=team,
            name=name,
            defaults={
                "sealed": vault.seal(document, owner=_owner(team.pk, name)),
                "changed_by": by,
                "changed_at": now(),
            },
        )[0]
    return secret


def _owner(team_id: str, name: str) -> str:
    """Return what an encrypted value is bound to; older values have it in their text only."""
    return f"secret {team_id} {name}"


def _refuse_newer(secret: Secret, seen: str, by: User) -> None:
    """Raise a conflict if the value was stored after the page was opened."""
    try:
        opened = datetime.fromisoformat(seen)
    except ValueError:
        return
    if opened.tzinfo is None or secret.changed_at <= opened:
        return
    owner = secret.changed_by.get_username() if secret.changed_by else ""
    reader = by.get_username()
    sentence = changed_words(f"{secret.name} was", owner, secret.changed_at, reader=reader)
    raise ConflictProblem(
        "changed_meanwhile",
        f"{sentence} Your change was not stored; repeat the change if it is still needed.",
    )


@sensitive_variables("value")
def _check(name: str, value: str) -> None:
    if not NAME.fullmatch(name):
        raise InvalidProblem(
            "secret_name",
            f"{name[:60]!r} is not a valid secret name. Use 2 to 40 capital letters, digits and "
            "underscores, a letter first, such as HF_TOKEN.",
        )
    if not SHORTEST <= len(value) <= LONGEST:
        raise InvalidProblem(
            "secret_value",
            f"The value has {len(value)} characters; it must have {SHORTEST} to {LONGEST:,}. "
            "Choose another value: a shorter one cannot be masked in logs.",
        )
    if "\0" in value:
        raise InvalidProblem(
            "secret_value",
            "The value contains a NUL character. Remove the character and store the secret again.",
        )


def secret_delete(*, secret: Secret, by: User | None = None, seen: str = "") -> None:
    """Delete a secret; hosts reject jobs that name it from now on.

    Raises:
        ConflictProblem: somebody stored another value since ``seen``.
    """
    with transaction.atomic():
        current = Secret.objects.select_for_update(no_key=True).filter(pk=secret.pk).first()
        if current is not None and by is not None:
            _refuse_newer(current, seen, by)
        secret.delete()


def secret_names(team: Team) -> list[str]:
    """Return the names of the team's secrets."""
    return list(Secret.objects.filter(team=team).order_by("name").values_list("name", flat=True))


@sensitive_variables()
def secrets_open(*, team_id: str, names: Iterable[str]) -> dict[str, str]:
    """Return the values of a team's secrets by name; missing names are left out.

    Raises:
        VaultError: an encrypted text cannot be decrypted, or belongs to another row.
    """
    values: dict[str, str] = {}
    rows = Secret.objects.filter(team=team_id, name__in=set(names))
    for row in rows:
        document = json.loads(vault.unseal(row.sealed, owner=_owner(team_id, row.name)))
        if (document.get("team"), document.get("name")) != (team_id, row.name):
            raise VaultError(
                f"The stored value of {row.name} was encrypted for another secret or team."
            )
        values[row.name] = str(document["value"])
    rows.update(last_given_at=now())
    return values


def secrets_reseal() -> int:
    """Encrypt every secret again with the newest key; return their number."""
    with transaction.atomic():
        rows = list(Secret.objects.select_for_update())
        for row in rows:
            row.sealed = vault.reseal(row.sealed, owner=_owner(row.team_id, row.name))
        Secret.objects.bulk_update(rows, ["sealed"])
    return len(rows)


# The page of a team's secrets: names are shown, values are write-only.


PAGE = "secrets"


@require_GET
@require_role(Role.PRACTITIONER)
def secret_list(request: HttpRequest) -> HttpResponse:
    """List the team's secrets; operators also get a form to store one."""
    team = current_team(request)
    context = {
        "team": team,
        "secrets": Secret.objects.filter(team=team).select_related("changed_by"),
        "seen": now().isoformat(),
        "may_change": is_at_least(current_role(request), Role.OPERATOR),
    }
    response = render(request, "accounts/secrets.html", context)
    response["Cache-Control"] = "no-store"
    return response


@sensitive_post_parameters("value")
@require_POST
@require_role(Role.OPERATOR)
def secret_save(request: HttpRequest) -> HttpResponse:
    """Store a value; no response contains it, not even after an error."""
    name, value = request.POST.get("name", "").strip(), pasted(request.POST.get("value", ""))
    try:
        secret_store(
            team=current_team(request),
            name=name,
            value=value,
            by=signed_in(request),
            seen=request.POST.get(SEEN, ""),
        )
    except Problem as problem:
        messages.error(request, problem.detail)
    except VaultError as error:
        messages.error(request, str(error))
    else:
        messages.success(
            request,
            f"{name} is stored{_lines_in(value)}. Jobs can use the secret; its value is not shown "
            "again.",
        )
    return redirect(PAGE)


@sensitive_variables()
def pasted(value: str) -> str:
    """Return a pasted value as the file that it came from holds it.

    Browsers send each line's end as CR LF; a token of one line has none, however it was copied.
    """
    text = unix_lines(value)
    lines = text.strip("\n")
    return text if "\n" in lines else lines


@sensitive_variables()
def _lines_in(value: str) -> str:
    number = value.count("\n") + (not value.endswith("\n"))
    return f" with its {number} lines" if number > 1 else ""


@require_POST
def secret_remove(request: HttpRequest, secret_id: str) -> HttpResponse:
    """Delete a secret."""
    secret = visible_or_404(Secret, request.user, pk=secret_id)
    membership = membership_of(request.user, secret.team)
    check_role(Role(membership.role) if membership else Role.VIEWER, Role.OPERATOR)
    secret_delete(secret=secret, by=signed_in(request), seen=request.POST.get(SEEN, ""))
    messages.success(
        request, f"{secret.name} is deleted. Jobs that name this secret no longer start."
    )
    return redirect(PAGE)
