"""An operator's word that another host is a different machine, or that it is not."""

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from webapp.core.problems import ConflictProblem, Problem
from webapp.hosts.beside import hosts_beside, hosts_tell_apart
from webapp.hosts.models import Host, Pool
from webapp.hosts.views import host_for_operator
from webapp.jobs.allocation import allocate_pool


def _other(request: HttpRequest, host: Host) -> Host:
    """Return the host that a form names, as long as it looks like the same machine.

    Raises:
        ConflictProblem: it does not, or does not any more.
    """
    wanted = str(request.POST.get("other", ""))
    known = {each.host_id for each in hosts_beside(host, request.user)}
    if wanted not in known:
        raise ConflictProblem(
            "not_alike", f"No such host looks like the machine of {host.name} now. Look again."
        )
    return Host.objects.select_related("pool").get(pk=wanted)


@require_POST
def host_apart(request: HttpRequest, slug: str) -> HttpResponse:
    """Take an operator's word that another host is a different machine, or that it is not."""
    host = host_for_operator(request, slug)
    is_apart = request.POST.get("word") != "same"
    try:
        other = _other(request, host)
    except Problem as problem:
        messages.warning(request, problem.detail)
        return redirect("host-detail", slug)
    hosts_tell_apart(host=host, other=other, by=request.user.get_username(), is_apart=is_apart)
    said = "count as different machines" if is_apart else "count as one machine again"
    messages.success(request, f"{host.name} and the other host {said}.")
    for pool in Pool.objects.filter(pk__in={host.pool_id, other.pool_id}):
        allocate_pool(pool)
    return redirect("host-detail", slug)
