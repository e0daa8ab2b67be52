"""Add a host: forms, an enrolment command with a one-time token, and a live check-list."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from django import forms
from django.conf import settings
from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from planner.catalog.devices import list_devices
from runners.shared.addresses import in_url, is_loopback, own_addresses
from webapp.accounts.models import Role
from webapp.accounts.services import current_team, require_role
from webapp.accounts.sign_in import session_secret_keep, session_secret_of
from webapp.core import display
from webapp.core.clock import now
from webapp.core.middleware import uncompressed
from webapp.core.names import shown_name
from webapp.core.numbers import DecimalField, WholeField
from webapp.core.parameters import choice_in_query, reads_query
from webapp.hosts.health import checklist, is_ready
from webapp.hosts.machines import GIB, virtual_host_create, wrong_price
from webapp.hosts.models import EnrolmentToken
from webapp.hosts.services import token_create, token_revoke
from webapp.live.stream import live_context, page_or_regions

# Forms of hosts: the enrolment form and the labels form.


POOL = re.compile(r"[a-z0-9][a-z0-9-]*")
MAX_LABELS = 12
LABELS_HINT = (
    "separated by spaces: gpu=4090 room=b12. usd_per_hour and usd_per_kwh price its jobs: "
    "usd_per_hour=2.50 usd_per_kwh=0.30"
)


class LabelsField(forms.CharField):
    """Labels typed as ``key=value`` separated by spaces; cleaned to a dict."""

    def __init__(self, **options: Any) -> None:
        super().__init__(max_length=400, required=False, **options)

    def clean(self, value: object) -> Any:  # noqa: ANN401 -- pairs, where the base has text
        """Return the labels as a dict.

        Raises:
            ValidationError: too many labels, one without ``=``, or an invalid price.
        """
        words = str(super().clean(value)).replace(",", " ").split()
        if len(words) > MAX_LABELS:
            raise forms.ValidationError(
                f"“Labels” has {len(words)} labels; the limit is {MAX_LABELS}. Remove some."
            )
        bad = [word for word in words if not re.fullmatch(r"[\w.-]+=[\w.-]+", word)]
        if bad:
            raise forms.ValidationError(f"“{bad[0]}” is not key=value; write it as gpu=4090.")
        labels = dict(word.split("=", 1) for word in words)
        if wrong := wrong_price(labels):
            raise forms.ValidationError(wrong)
        return labels


def labels_text(labels: Mapping[str, object]) -> str:
    """Return labels as the text that people type."""
    return " ".join(f"{key}={value}" for key, value in labels.items())


class LabelsForm(forms.Form):
    """The labels of an existing host, including its prices."""

    labels = LabelsField(label="Labels", help_text=f"As key=value, {LABELS_HINT}")


class AddHostForm(forms.Form):
    """Name, pool and labels of a host to enrol."""

    name = forms.CharField(
        max_length=80,
        validators=[shown_name],
        help_text="Name shown on pages, such as lab-dgx or workstation-2.",
    )
    pool = forms.CharField(
        max_length=40, initial="default", help_text="Hosts of one pool take the same jobs."
    )
    labels = LabelsField(help_text=f"Optional, as key=value, {LABELS_HINT}")

    def clean_pool(self) -> str:
        """Return the pool in lower case; reject one that cannot be part of a URL."""
        pool = str(self.cleaned_data["pool"]).strip().lower()
        if not POOL.fullmatch(pool):
            raise forms.ValidationError(
                f"“{pool}” is not a valid pool name. Use lower-case letters, digits and hyphens; "
                "choose a name such as lab-a."
            )
        return pool


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
            "Installs the agent in its own environment; slipway-host is then the command for "
            "everything else.",
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


def server_for_hosts(request: HttpRequest) -> tuple[str, bool]:
    """Return the site's address for a host, and whether only this machine can reach it.

    A browser on this machine, or at the end of an SSH tunnel, asks for a loopback name. If the
    site also answers at an address of the machine, as by ``up --host 0.0.0.0``, hosts get that.
    """
    server = request.build_absolute_uri("/").rstrip("/")
    if not is_loopback(urlsplit(server).hostname or ""):
        return server, False
    for own in map(in_url, own_addresses()):
        if own in settings.ALLOWED_HOSTS:
            return f"{request.scheme}://{own}:{request.META['SERVER_PORT']}", False
    return server, True


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


def _devices() -> list[tuple[str, str]]:
    return sorted(
        ((device.id, f"{device.name or device.id} · {display.gib(device.memory_bytes)} GiB"))
        for device in list_devices()
    )


class VirtualHostForm(forms.Form):
    """A machine that the team considers buying or renting."""

    name = forms.CharField(
        max_length=80,
        validators=[shown_name],
        help_text="Name shown on pages, such as next-rack.",
    )
    device = forms.ChoiceField(choices=_devices)
    num_devices = WholeField(
        min_value=1, max_value=1024, initial=8, label="Devices in the machine"
    )
    memory_gib = DecimalField(
        required=False,
        min_value=1,
        max_value=1_000_000,
        label="Memory of the machine, in GiB",
        help_text="Empty: not known, so plans that need it say so.",
    )


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
