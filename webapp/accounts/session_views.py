"""The page of a user's open sessions, with log-out of other browsers."""

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_POST

from webapp.accounts.sessions import sessions_end, sessions_of
from webapp.plans.access import signed_in

EVERY_OTHER = "others"


@require_GET
def session_list(request: HttpRequest) -> HttpResponse:
    """List the browsers in which the user is logged in."""
    open_here = list(sessions_of(signed_in(request)))
    context = {"open_sessions": open_here, "this_key": request.session.session_key}
    response = render(request, "accounts/sessions.html", context)
    response["Cache-Control"] = "no-store"
    return response


@require_POST
def session_end(request: HttpRequest) -> HttpResponse:
    """Log out one of the user's browsers, or all but this one."""
    rows = sessions_of(signed_in(request))
    chosen = request.POST.get("session", "")
    if chosen == EVERY_OTHER:
        rows = rows.exclude(session_key=request.session.session_key)
    else:
        rows = rows.filter(pk=chosen)
    if count := sessions_end(rows):
        messages.success(request, f"{count} browser{'s' if count > 1 else ''} logged out.")
    else:
        messages.warning(request, "None of your browsers was logged in under that name.")
    return redirect("sessions")
