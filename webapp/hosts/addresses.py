"""The operator's choice of the address at which a job's other hosts reach a host."""

from django.db import transaction

from webapp.audit.models import event_record, refuse_if_changed
from webapp.core.problems import InvalidProblem
from webapp.hosts.models import Host


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
            f"{host.name} has {', '.join(known) or 'no address'}, not “{address[:60]}”. Choose a "
            "reported address, or enrol the host again with --address.",
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
        event_record(host, "host.address", by, detail={"address": address})
