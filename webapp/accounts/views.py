"""The switches of the account menu, theme and team; logging in and out is Django's own."""

from django.contrib import messages
from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_POST

from webapp.accounts.roles import choose_team

YEAR_SECONDS = 365 * 24 * 3600
THEMES = ("light", "dark", "system")


@login_not_required
@require_POST
def theme_choose(request: HttpRequest) -> HttpResponse:
    """Remember light, dark or system in a cookie and go back to the page."""
    theme = request.POST.get("theme", "")
    response = _back(request)
    if theme in THEMES:
        response.set_cookie("theme", theme, max_age=YEAR_SECONDS, samesite="Lax")
    return response


@require_POST
def team_choose(request: HttpRequest) -> HttpResponse:
    """Work for another of the user's teams, and go back to the page."""
    team = choose_team(request, request.POST.get("team", ""))
    messages.success(request, f"You work for {team.name} now: what you make next belongs to it.")
    return _back(request)


def _back(request: HttpRequest) -> HttpResponse:
    """Return to the page that a form of the menu names, if it is ours."""
    after = request.POST.get("next", "")
    is_ours = url_has_allowed_host_and_scheme(after, allowed_hosts={request.get_host()})
    return redirect(after if is_ours else "/")
