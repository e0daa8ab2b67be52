"""Theme and team switches of the account menu."""

from django.contrib import messages
from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_POST

from webapp.accounts.roles import choose_team
from webapp.core.middleware import redirect_to_own

YEAR_SECONDS = 365 * 24 * 3600
THEMES = ("light", "dark", "system")


@login_not_required
@require_POST
def theme_choose(request: HttpRequest) -> HttpResponse:
    """Store the theme in a cookie and redirect to the previous page."""
    theme = request.POST.get("theme", "")
    response = _back(request)
    if theme in THEMES:
        response.set_cookie("theme", theme, max_age=YEAR_SECONDS, samesite="Lax")
    return response


@require_POST
def team_choose(request: HttpRequest) -> HttpResponse:
    """Switch to another of the user's teams and redirect to the previous page."""
    team = choose_team(request, request.POST.get("team", ""))
    messages.success(request, f"You work for {team.name} now: what you make next belongs to it.")
    return _back(request)


def _back(request: HttpRequest) -> HttpResponse:
    """Redirect to the page named by the form, if it is a page of this site."""
    return redirect_to_own(request, request.POST.get("next", ""), "/")
