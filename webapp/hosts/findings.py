"""What was found out about a host beside what it says: the JSON of ``Host.checks``."""

from typing import Any

from django.db import transaction

from webapp.core.clock import now
from webapp.hosts.models import Host
from webapp.jobs.models import Event
from webapp.live.publish import publish_host_checks

WANTS_RECHECK = "wants_recheck"


def checks_update(host_id: str, **changes: Any) -> dict[str, Any]:
    """Change some of a host's findings and return all; None takes one out."""
    with transaction.atomic():
        host = Host.objects.select_for_update(no_key=True).only("checks").get(pk=host_id)
        merged = host.checks | changes
        kept = {name: value for name, value in merged.items() if value is not None}
        Host.objects.filter(pk=host_id).update(checks=kept)
    return kept


def recheck_ask(*, host: Host, by: str) -> None:
    """Have a host say anew what it is, and its queue be tried again."""
    with transaction.atomic():
        host.checks = checks_update(host.pk, **{WANTS_RECHECK: True, "queue": None})
        Event.objects.create(
            at=now(), team_id=host.team_id, kind="host.rechecked", subject=host.pk, actor=by
        )
    publish_host_checks(host)
