"""The page of a team's secrets: names are shown, values are write-only."""

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_POST

from webapp.accounts.models import Role, Secret
from webapp.accounts.roles import (
    check_role,
    current_role,
    current_team,
    is_at_least,
    membership_of,
    require_role,
    visible_or_404,
)
from webapp.accounts.secrets import secret_delete, secret_store
from webapp.core.clock import now
from webapp.core.problems import Problem
from webapp.core.stale import SEEN
from webapp.core.vault import VaultError
from webapp.plans.access import signed_in

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
    name, value = request.POST.get("name", "").strip(), request.POST.get("value", "")
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
        messages.success(request, f"{name} is stored. It cannot be read here; jobs can use it.")
    return redirect(PAGE)


@require_POST
def secret_remove(request: HttpRequest, secret_id: str) -> HttpResponse:
    """Delete a secret."""
    secret = visible_or_404(Secret, request.user, pk=secret_id)
    membership = membership_of(request.user, secret.team)
    check_role(Role(membership.role) if membership else Role.VIEWER, Role.OPERATOR)
    secret_delete(secret=secret, by=signed_in(request), seen=request.POST.get(SEEN, ""))
    messages.success(request, f"{secret.name} is forgotten. Jobs that name it no longer start.")
    return redirect(PAGE)
