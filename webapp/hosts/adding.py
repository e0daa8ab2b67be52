"""Add a host: a form, an enrolment command with a one-time token, and a live check-list."""

from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from webapp.accounts.models import Role
from webapp.accounts.roles import current_team, require_role
from webapp.accounts.sessions import session_secret_keep, session_secret_of
from webapp.core.clock import now
from webapp.core.middleware import uncompressed
from webapp.hosts.checks import checklist, is_ready
from webapp.hosts.forms import AddHostForm
from webapp.hosts.models import EnrolmentToken
from webapp.hosts.services import token_create, token_revoke
from webapp.live.publish import live_context, page_or_regions

# Enrolment commands of a host: for pip, pipx, systemd and a Slurm login node.


PACKAGE = "'slipway[worker,gpu]'"
UNIT = "~/.config/systemd/user/slipway-host.service"


@dataclass(frozen=True)
class InstallCommand:
    """One tab: its name, the command, and a note about it."""

    key: str
    name: str
    command: str
    note: str


def install_commands(server: str, token: str) -> list[InstallCommand]:
    """Return the command of every installation method, ready to paste."""
    enroll = f"enroll --server {server} --token {token}"
    python = "python -m runners"
    return [
        InstallCommand(
            "pip",
            "pip",
            f"{python} {enroll} && {python} work",
            f"Needs Python 3.11 and pip install {PACKAGE}, or a checkout of this repository.",
        ),
        InstallCommand(
            "pipx",
            "pipx",
            f"pipx install {PACKAGE} && slipway-host {enroll} && slipway-host work",
            "An environment of its own; slipway-host is then the command for all else.",
        ),
        InstallCommand(
            "systemd",
            "systemd",
            f"{python} {enroll} && mkdir -p {UNIT.rpartition('/')[0]} && {python} unit > {UNIT} "
            "&& loginctl enable-linger && systemctl --user enable --now slipway-host",
            "Starts with the machine, as your own user. Jobs outlive a restart of the service. "
            "Review the unit first with python -m runners unit.",
        ),
        InstallCommand(
            "slurm",
            "Slurm login node",
            f"{python} {enroll} --slurm --partition gpu --gres gpu:1 && {python} work",
            "The agent stays on the login node and hands each job to Slurm with sbatch. Name your "
            "own partition and what a job gets of a node. The home folder must be shared.",
        ),
    ]


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
def host_check(request: HttpRequest, token_id: str) -> HttpResponse:
    """Show the enrolment command of a token and the check-list of the host that used it."""
    token = _token(request, token_id)
    context = _context(request, token)
    topics = ["hosts", *([f"host:{token.host.pk}"] if token.host else [])]
    context |= live_context(request, topics)
    response = page_or_regions(request, "hosts/check.html", "hosts/_check.html", context)
    return uncompressed(response) if context["ways"] else response


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
    server = request.build_absolute_uri(reverse("home")).rstrip("/")
    choices = install_commands(server, text) if text else []
    chosen = next((way for way in choices if way.key == request.GET.get("way")), None)
    return {
        "token": token,
        "host": token.host,
        "ways": choices,
        "way": chosen or next(iter(choices), None),
        "minutes_left": max(1, int(seconds_left // 60)),
        "is_expired": token.used_at is None and token.revoked_at is None and seconds_left <= 0,
        "checks": checklist(token, token.host),
        "is_ready": is_ready(token.host),
        "is_operator": True,
    }
