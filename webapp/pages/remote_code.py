"""The page of repositories whose own code the team's jobs may run."""

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_POST

from webapp.accounts.models import Role
from webapp.accounts.services import (
    check_role,
    current_role,
    current_team,
    is_at_least,
    membership_of,
    require_role,
    visible_or_404,
)
from webapp.core.problems import Problem
from webapp.modelhub.models import TrustedCode
from webapp.modelhub.remote_code import LONGEST_REASON, code_allow, code_forbid

PAGE = "remote-code"


@require_GET
@require_role(Role.VIEWER)
def code_list(request: HttpRequest) -> HttpResponse:
    """List the repositories whose code is allowed; admins also get a form to allow one."""
    team = current_team(request)
    context = {
        "team": team,
        "rows": TrustedCode.objects.filter(team=team),
        "may_change": is_at_least(current_role(request), Role.ADMIN),
        "longest_reason": LONGEST_REASON,
    }
    return render(request, "modelhub/remote_code.html", context)


@require_POST
@require_role(Role.ADMIN)
def code_save(request: HttpRequest) -> HttpResponse:
    """Allow the code of a repository at a commit."""
    try:
        row = code_allow(
            team=current_team(request),
            name=request.POST.get("model", ""),
            reason=request.POST.get("reason", ""),
            by=request.user.get_username(),
        )
    except Problem as problem:
        messages.error(request, problem.detail)
    else:
        messages.success(request, f"Jobs may run the code of {row}, and of no other commit.")
    return redirect(PAGE)


@require_POST
def code_remove(request: HttpRequest, code_id: str) -> HttpResponse:
    """Withdraw the permission."""
    row = visible_or_404(TrustedCode, request.user, pk=code_id)
    membership = membership_of(request.user, row.team)
    check_role(Role(membership.role) if membership else Role.VIEWER, Role.ADMIN)
    code_forbid(row=row, by=request.user.get_username())
    messages.success(request, f"The code of {row} no longer runs in new jobs.")
    return redirect(PAGE)
