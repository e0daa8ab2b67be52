"""Operators' actions on hosts: cordons, maintenance, environments, labels, addresses."""

from collections.abc import Mapping

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST

from webapp.audit.models import refuse_if_changed
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, InvalidProblem, Problem
from webapp.core.stale import SEEN
from webapp.hosts.adding import LabelsForm, written
from webapp.hosts.cordons import device_cordon, device_uncordon, device_words, host_take_out
from webapp.hosts.environments import environment_order
from webapp.hosts.machines import hosts_mark_distinct, hosts_on_same_machine
from webapp.hosts.models import Device, Host, HostState, Pool
from webapp.hosts.views import host_context, host_for_operator
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.models import Event

# Operator actions: cordon and uncordon devices, maintenance and retirement of hosts.


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


# Operator actions on a host's environments: build and remove.


def _order(request: HttpRequest, slug: str, name: str, action: str, words: str) -> HttpResponse:
    host = host_for_operator(request, slug)
    try:
        environment_order(host=host, name=name, action=action, by=request.user.get_username())
    except Problem as problem:
        messages.warning(request, problem.detail)
    else:
        messages.success(request, f"{host.name} {words} {name} after its next heartbeat.")
    return redirect("host-detail", slug)


@require_POST
def environment_build(request: HttpRequest, slug: str, name: str) -> HttpResponse:
    """Request that a host builds an environment before a job needs it."""
    return _order(request, slug, name, "build", "builds")


@require_POST
def environment_remove(request: HttpRequest, slug: str, name: str) -> HttpResponse:
    """Request that a host deletes an environment that no job runs in."""
    return _order(request, slug, name, "remove", "removes")


# Change a host's labels, including its prices; operators only.


def labels_set(*, host: Host, labels: Mapping[str, str], by: str, seen: str = "") -> bool:
    """Replace a host's labels; return whether they changed.

    ``seen`` is the version mark of the labels that the page showed.

    Raises:
        ConflictProblem: another person changed them since.
    """
    with transaction.atomic():
        before = Host.objects.select_for_update(no_key=True).get(pk=host.pk).labels
        if before == labels:
            return False
        refuse_if_changed(
            seen=seen,
            now_there=before,
            what=f"The labels of {host.name} were",
            subject=host.pk,
            kind="host.labels",
            reader=by,
        )
        Host.objects.filter(pk=host.pk).update(labels=dict(labels))
        Event.objects.create(
            at=now(),
            team_id=host.team_id,
            kind="host.labels",
            subject=host.pk,
            actor=by,
            detail={"labels": dict(labels), "before": before},
        )
    return True


@require_POST
def host_labels(request: HttpRequest, slug: str) -> HttpResponse:
    """Change a host's labels; show the form again with the input if it is invalid."""
    host = host_for_operator(request, slug)
    form = LabelsForm(request.POST)
    if not form.is_valid():
        context = host_context(request, host) | {"labels_form": form}
        return render(request, "hosts/detail.html", context, status=400)
    labels = form.cleaned_data["labels"]
    by, seen = request.user.get_username(), request.POST.get(SEEN, "")
    try:
        is_changed = labels_set(host=host, labels=labels, by=by, seen=seen)
    except Problem as problem:
        messages.warning(request, f"{problem.detail} You had typed: {written(labels) or 'none'}.")
        return redirect("host-detail", slug)
    if is_changed:
        text = written(labels) or "none"
        messages.success(request, f"Labels of {host.name}: {text}. Its prices count from now on.")
    return redirect("host-detail", slug)


# The operator's choice of the address at which a job's other hosts reach a host.


def address_choose(*, host: Host, address: str, by: str, seen: str = "") -> None:
    """Set the address at which later jobs reach a host, one of those it reported.

    ``seen`` is the version mark of the choice that the page showed.

    Raises:
        InvalidProblem: the host has no such address.
        ConflictProblem: another person changed the address since.
    """
    known = [str(each) for each in host.facts.get("addresses") or []]
    if address not in known:
        raise InvalidProblem(
            "no_such_address",
            f"{host.name} has {', '.join(known) or 'no address'}, not “{address[:60]}”. Choose "
            "one of those, or enrol it again with --address.",
        )
    with transaction.atomic():
        chosen = Host.objects.select_for_update(no_key=True).get(pk=host.pk).address
        refuse_if_changed(
            seen=seen,
            now_there=chosen,
            what=f"The address of {host.name} was",
            subject=host.pk,
            kind="host.address",
            reader=by,
        )
        Host.objects.filter(pk=host.pk).update(address=address)
        Event.objects.create(
            at=now(),
            team_id=host.team_id,
            kind="host.address",
            subject=host.pk,
            actor=by,
            detail={"address": address},
        )


@require_POST
def host_address(request: HttpRequest, slug: str) -> HttpResponse:
    """Set the address at which other hosts reach this one."""
    host = host_for_operator(request, slug)
    address = str(request.POST.get("address", "")).strip()
    try:
        by, seen = request.user.get_username(), request.POST.get(SEEN, "")
        address_choose(host=host, address=address, by=by, seen=seen)
    except Problem as problem:
        messages.warning(request, problem.detail)
    else:
        messages.success(request, f"Later jobs reach {host.name} at {address}.")
    return redirect("host-detail", slug)


# Operator action: mark two hosts as different machines, or undo it.


def _requested_host(request: HttpRequest, host: Host) -> Host:
    """Return the host named in the form, if it looks like the same machine.

    Raises:
        ConflictProblem: it does not look like the same machine (any more).
    """
    other_id = str(request.POST.get("other", ""))
    candidates = {each.host_id for each in hosts_on_same_machine(host, request.user)}
    if other_id not in candidates:
        raise ConflictProblem(
            "not_alike", f"No such host matches the machine of {host.name} now. Reload the page."
        )
    return Host.objects.select_related("pool").get(pk=other_id)


@require_POST
def host_apart(request: HttpRequest, slug: str) -> HttpResponse:
    """Mark another host as a different machine, or undo it."""
    host = host_for_operator(request, slug)
    is_apart = request.POST.get("word") != "same"
    try:
        other = _requested_host(request, host)
    except Problem as problem:
        messages.warning(request, problem.detail)
        return redirect("host-detail", slug)
    hosts_mark_distinct(host=host, other=other, by=request.user.get_username(), is_apart=is_apart)
    words = "count as different machines" if is_apart else "count as one machine again"
    messages.success(request, f"{host.name} and the other host {words}.")
    for pool in Pool.objects.filter(pk__in={host.pool_id, other.pool_id}):
        allocate_pool(pool)
    return redirect("host-detail", slug)
