"""Add a host: a form, one command with a one-time token, a check-list that ticks."""

from typing import Any

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from webapp.accounts.models import Role
from webapp.accounts.roles import current_team, require_role
from webapp.core.clock import now
from webapp.hosts.checks import checklist, is_ready
from webapp.hosts.forms import AddHostForm
from webapp.hosts.models import EnrolmentToken
from webapp.hosts.services import token_create, token_revoke
from webapp.hosts.ways import ways
from webapp.live.page import live_context, page_or_regions

SECRETS = "enrolment-secrets"  # session key: token id -> its text, until the page is left


@require_http_methods(["GET", "POST"])
@require_role(Role.OPERATOR)
def host_add(request: HttpRequest) -> HttpResponse:
    """Ask for a name, a pool and labels, and make a token of them."""
    form = AddHostForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        user = request.user
        token, text = token_create(
            team=current_team(request),
            by=user if user.is_authenticated else None,
            name=form.cleaned_data["name"],
            pool=form.cleaned_data["pool"],
            labels=form.cleaned_data["labels"],
        )
        request.session[SECRETS] = {token.pk: text}
        return redirect("host-check", token.pk)
    response = page_or_regions(request, "hosts/add.html", "hosts/add.html", {"form": form})
    response.status_code = 422 if form.errors else 200
    return response


@never_cache
@require_GET
@require_role(Role.OPERATOR)
def host_check(request: HttpRequest, token_id: str) -> HttpResponse:
    """Show the command of a token, and the check-list of the host that used it."""
    token = _token(request, token_id)
    context = _context(request, token)
    topics = ["hosts", *([f"host:{token.host.pk}"] if token.host else [])]
    context |= live_context(request, topics)
    return page_or_regions(request, "hosts/check.html", "hosts/_check.html", context)


@require_POST
@require_role(Role.OPERATOR)
def token_revoke_view(request: HttpRequest, token_id: str) -> HttpResponse:
    """Make an unused token worthless."""
    token = _token(request, token_id)
    if token_revoke(token=token):
        messages.success(request, "The token is revoked. Nobody can enrol with it any more.")
    else:
        messages.warning(request, "The token was already used or revoked.")
    return redirect("host-list")


def _token(request: HttpRequest, token_id: str) -> EnrolmentToken:
    tokens = EnrolmentToken.objects.select_related("host")
    token = tokens.filter(pk=token_id, team=current_team(request)).first()
    if not isinstance(token, EnrolmentToken):
        raise Http404("Your team has no such token.")
    return token


def _context(request: HttpRequest, token: EnrolmentToken) -> dict[str, Any]:
    left = (token.expires_at - now()).total_seconds()
    is_open = token.used_at is None and token.revoked_at is None and left > 0
    text = request.session.get(SECRETS, {}).get(token.pk) if is_open else None
    server = request.build_absolute_uri(reverse("home")).rstrip("/")
    choices = ways(server, text) if text else []
    chosen = next((way for way in choices if way.key == request.GET.get("way")), None)
    return {
        "token": token,
        "host": token.host,
        "ways": choices,
        "way": chosen or next(iter(choices), None),
        "minutes_left": max(1, int(left // 60)),
        "is_expired": token.used_at is None and token.revoked_at is None and left <= 0,
        "checks": checklist(token, token.host),
        "is_ready": is_ready(token.host),
        "is_operator": True,
    }
