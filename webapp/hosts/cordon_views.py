"""What an operator does to a device, and to a host that is to be opened or to leave."""

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.views.decorators.http import require_POST

from webapp.core.problems import Problem
from webapp.hosts.cordons import device_cordon, device_uncordon, device_words, host_take_out
from webapp.hosts.models import Device, HostState
from webapp.hosts.views import host_for_operator
from webapp.jobs.allocation import allocate_pool


def _device(request: HttpRequest, slug: str, device_id: str) -> Device:
    host = host_for_operator(request, slug)
    return get_object_or_404(Device.objects.select_related("host__pool"), host=host, pk=device_id)


@require_POST
def device_cordon_view(request: HttpRequest, slug: str, device_id: str) -> HttpResponse:
    """Keep a device from new jobs, with a reason."""
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
    """Let a device take jobs again."""
    device = _device(request, slug, device_id)
    device_uncordon(device=device, by=request.user.get_username())
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
    """Say that a host is being worked on."""
    return _take_out(request, slug, HostState.MAINTENANCE, "is in maintenance")


@require_POST
def host_retire(request: HttpRequest, slug: str) -> HttpResponse:
    """Take a host out of its pool for good."""
    return _take_out(request, slug, HostState.RETIRED, "is retired; enrol it anew to use it")
