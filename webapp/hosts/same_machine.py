"""Operator action: mark two hosts as different machines, or undo it."""

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from webapp.core.problems import ConflictProblem, Problem
from webapp.hosts.models import Host, Pool
from webapp.hosts.shared_machine import hosts_mark_distinct, hosts_on_same_machine
from webapp.hosts.views import host_for_operator
from webapp.jobs.allocation import allocate_pool


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
