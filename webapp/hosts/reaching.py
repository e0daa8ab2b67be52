"""The operator's choice of the address at which a job's other hosts reach a host."""

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from webapp.audit.changes import refuse_if_changed
from webapp.core.clock import now
from webapp.core.problems import InvalidProblem, Problem
from webapp.core.stale import SEEN
from webapp.hosts.models import Host
from webapp.hosts.views import host_for_operator
from webapp.jobs.models import Event


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
