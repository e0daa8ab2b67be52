"""Virtual hosts: catalog hardware under a team's own name, for planning only."""

from typing import Any

from django import forms
from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from planner.catalog.devices import get_device, list_devices
from planner.specs.cluster import ClusterSpec
from webapp.accounts.models import Role, Team
from webapp.accounts.roles import current_team, require_role
from webapp.core import units
from webapp.core.clock import now
from webapp.hosts.models import Host, HostState
from webapp.hosts.pools import pool_ensure
from webapp.hosts.services import free_slug
from webapp.jobs.models import Event

GIB = 1024**3


def virtual_host_create(
    *, team: Team, name: str, device: str, num_devices: int, memory_bytes: int | None, by: str
) -> Host:
    """Return a new host that can be planned for and runs no jobs."""
    planned = {"device": device, "num_devices": num_devices, "memory_bytes": memory_bytes}
    with transaction.atomic():
        host = Host.objects.create(
            team=team,
            name=name,
            slug=free_slug(name),
            kind="virtual",
            state=HostState.READY,
            pool=pool_ensure(team=team),
            planned=planned,
        )
        Event.objects.create(
            at=now(),
            team_id=team.pk,
            kind="host.planned",
            subject=host.pk,
            to_state=host.state,
            actor=by,
        )
    return host


def planned_cluster(host: Host) -> ClusterSpec:
    """Return the cluster of one node that a virtual host stands for."""
    planned: dict[str, Any] = host.planned
    return ClusterSpec(
        device=planned["device"],
        devices_per_node=planned["num_devices"],
        host_memory_bytes=planned["memory_bytes"],
    )


def planned_words(host: Host) -> str:
    """Return a virtual host in one line: “8 × H100, 80 GiB each”."""  # noqa: RUF002 -- a multiplication sign
    device = get_device(host.planned["device"])
    count, memory = host.planned["num_devices"], units.memory(device.memory_bytes)
    return f"{count} × {device.name or device.id}, {memory} each"  # noqa: RUF001 -- a multiplication sign


def _devices() -> list[tuple[str, str]]:
    return sorted(
        ((device.id, f"{device.name or device.id} · {units.gib(device.memory_bytes)} GiB"))
        for device in list_devices()
    )


class VirtualHostForm(forms.Form):
    """A machine that the team considers buying or renting."""

    name = forms.CharField(max_length=80, help_text="What your team calls it, such as next-rack.")
    device = forms.ChoiceField(choices=_devices)
    num_devices = forms.IntegerField(
        min_value=1, max_value=1024, initial=8, label="Devices in the machine"
    )
    memory_gib = forms.FloatField(
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
        messages.success(request, f"{host.name} can be planned for now. Nothing runs on it.")
        return redirect("host-detail", host.slug)
    status = 422 if form.errors else 200
    return render(request, "hosts/virtual.html", {"form": form}, status=status)
