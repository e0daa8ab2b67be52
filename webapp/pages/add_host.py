"""Add a host: forms, an enrolment command with a one-time token, and a live check-list."""

from typing import Any

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from planner.specs.units import GIB
from webapp.accounts.models import Role
from webapp.accounts.services import current_team, require_role
from webapp.accounts.sign_in import session_secret_keep, session_secret_of
from webapp.core.clock import now
from webapp.core.middleware import uncompressed
from webapp.core.parameters import choice_in_query, reads_query
from webapp.hosts.adding import AddHostForm, VirtualHostForm
from webapp.hosts.health import checklist, is_ready
from webapp.hosts.install_commands import install_commands, server_for_hosts
from webapp.hosts.machines import virtual_host_create
from webapp.hosts.models import EnrolmentToken
from webapp.hosts.services import token_create, token_revoke
from webapp.live.stream import live_context, page_or_regions

SECRETS = "enrolment-secrets"  # session key: token id -> encrypted token text


@require_http_methods(["GET", "POST"])
@require_role(Role.OPERATOR)
def host_add(request: HttpRequest) -> HttpResponse:
    """Show a form for name, pool and labels, and create an enrolment token from it."""
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
        session_secret_keep(request, SECRETS, token.pk, text)
        return redirect("host-check", token.pk)
    response = page_or_regions(request, "hosts/add.html", "hosts/add.html", {"form": form})
    response.status_code = 422 if form.errors else 200
    return response


@never_cache
@require_GET
@require_role(Role.OPERATOR)
@reads_query("way")
def host_check(request: HttpRequest, token_id: str) -> HttpResponse:
    """Show the enrolment command of a token and the check-list of the host that used it."""
    token = _token(request, token_id)
    context = _context(request, token)
    topics = ["hosts", *([f"host:{token.host.pk}"] if token.host else [])]
    context |= live_context(request, topics)
    response = page_or_regions(request, "hosts/check.html", "hosts/_check.html", context)
    return uncompressed(response) if context["install_commands"] else response


@require_POST
@require_role(Role.OPERATOR)
def token_revoke_view(request: HttpRequest, token_id: str) -> HttpResponse:
    """Revoke an unused enrolment token."""
    token = _token(request, token_id)
    if token_revoke(token=token):
        messages.success(request, "The token is revoked and can no longer be used.")
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
    seconds_left = (token.expires_at - now()).total_seconds()
    is_open = token.used_at is None and token.revoked_at is None and seconds_left > 0
    text = session_secret_of(request, SECRETS, token.pk) if is_open else ""
    server, is_local = server_for_hosts(request)
    choices = install_commands(server, text) if text else []
    way = choice_in_query(request, "way", [each.key for each in choices]) if choices else ""
    chosen = next((each for each in choices if each.key == way), None)
    return {
        "token": token,
        "host": token.host,
        "install_commands": choices,
        "local_server": server if is_local else "",
        "chosen_command": chosen or next(iter(choices), None),
        "minutes_left": max(1, int(seconds_left // 60)),
        "is_expired": token.used_at is None and token.revoked_at is None and seconds_left <= 0,
        "checks": checklist(token, token.host),
        "is_ready": is_ready(token.host),
        "is_operator": True,
    }


@require_http_methods(["GET", "POST"])
@require_role(Role.OPERATOR)
def virtual_host_new(request: HttpRequest) -> HttpResponse:
    """Show a form for the machine, and create a virtual host from it."""
    form = VirtualHostForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        values = form.cleaned_data
        host = virtual_host_create(
            team=current_team(request),
            name=values["name"],
            device=values["device"],
            num_devices=values["num_devices"],
            memory_bytes=int(values["memory_gib"] * GIB) if values["memory_gib"] else None,
            by=request.user.get_username(),
        )
        messages.success(
            request,
            f"Plans can now choose {host.name}. It is a planning-only host: no job runs on it.",
        )
        return redirect("host-detail", host.slug)
    status = 422 if form.errors else 200
    return render(request, "hosts/virtual.html", {"form": form}, status=status)
