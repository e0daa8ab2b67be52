"""Operator actions: cordon and uncordon devices, maintenance and retirement of hosts."""

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.views.decorators.http import require_POST

from webapp.core.problems import Problem
from webapp.core.stale import SEEN
from webapp.hosts.cordons import device_cordon, device_uncordon, device_words, host_take_out
from webapp.hosts.models import Device, HostState
from webapp.hosts.views import host_for_operator
from webapp.jobs.allocation import allocate_pool


def _device(request: HttpRequest, slug: str, device_id: str) -> Device:
    host = host_for_operator(request, slug)
    return get_object_or_404(Device.objects.select_related("host__pool"), host=host, pk=device_id)


@require_POST
def device_cordon_view(request: HttpRequest, slug: str, device_id: str) -> HttpResponse:
    """Cordon a device, with a reason: it takes no new jobs."""
    device = _device(request, slug, device_id)
    by, reason = request.user.get_username(), str(request.POST.get("reason", ""))
    try:
        device_cordon(device=device, by=by, reason=reason)
    except Problem as problem:
        messages.warning(request, problem.detail)
    else:
        messages.success(request, f"{device_words(device)} takes no new job.")
    return redirect("host-detail", slug)


@require_POST
def device_uncordon_view(request: HttpRequest, slug: str, device_id: str) -> HttpResponse:
    """Uncordon a device: it takes jobs again."""
    device = _device(request, slug, device_id)
    by, seen = request.user.get_username(), request.POST.get(SEEN, "")
    try:
        device_uncordon(device=device, by=by, seen=seen)
    except Problem as problem:
        messages.warning(request, problem.detail)
    else:
        messages.success(request, f"{device_words(device)} takes jobs again.")
        allocate_pool(device.host.pool)
    return redirect("host-detail", slug)


def _take_out(request: HttpRequest, slug: str, to: HostState, words: str) -> HttpResponse:
    host = host_for_operator(request, slug)
    try:
        host_take_out(host=host, to=to, by=request.user.get_username())
    except Problem as problem:
        messages.warning(request, problem.detail)
    else:
        messages.success(request, f"{host.name} {words}.")
    return redirect("host-detail", slug)


@require_POST
def host_maintenance(request: HttpRequest, slug: str) -> HttpResponse:
    """Put a host into maintenance."""
    return _take_out(request, slug, HostState.MAINTENANCE, "is in maintenance")


@require_POST
def host_retire(request: HttpRequest, slug: str) -> HttpResponse:
    """Retire a host for good."""
    return _take_out(request, slug, HostState.RETIRED, "is retired; enrol it again to use it")
