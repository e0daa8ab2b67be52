"""The theme switch for browsers without JavaScript; logging in and out is Django's own."""

from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_POST

YEAR_SECONDS = 365 * 24 * 3600
THEMES = ("light", "dark", "system")


@login_not_required
@require_POST
def theme_choose(request: HttpRequest) -> HttpResponse:
    """Remember light, dark or system in a cookie and go back to the page."""
    theme = request.POST.get("theme", "")
    after = request.POST.get("next", "")
    is_ours = url_has_allowed_host_and_scheme(after, allowed_hosts={request.get_host()})
    response = redirect(after if is_ours else "/")
    if theme in THEMES:
        response.set_cookie("theme", theme, max_age=YEAR_SECONDS, samesite="Lax")
    return response
