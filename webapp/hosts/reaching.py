"""By which of its addresses a host is reached by the others of a job: an operator's choice."""

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from webapp.core.clock import now
from webapp.core.problems import InvalidProblem, Problem
from webapp.hosts.models import Host
from webapp.hosts.views import host_for_operator
from webapp.jobs.models import Event


def address_choose(*, host: Host, address: str, by: str) -> None:
    """Have later jobs reach a host at one of the addresses that it says it has.

    Raises:
        InvalidProblem: it has no such address.
    """
    known = [str(each) for each in host.facts.get("addresses") or []]
    if address not in known:
        raise InvalidProblem(
            "no_such_address",
            f"{host.name} has {', '.join(known) or 'no address'}, not “{address[:60]}”. Choose "
            "one of those, or enrol it again with --address.",
        )
    with transaction.atomic():
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
    """Choose the address by which other hosts reach this one."""
    host = host_for_operator(request, slug)
    address = str(request.POST.get("address", "")).strip()
    try:
        address_choose(host=host, address=address, by=request.user.get_username())
    except Problem as problem:
        messages.warning(request, problem.detail)
    else:
        messages.success(request, f"Later jobs reach {host.name} at {address}.")
    return redirect("host-detail", slug)
