"""Server-side findings about a host: the JSON of ``Host.checks``."""

from typing import Any

from django.db import transaction

from webapp.core.clock import now
from webapp.hosts.models import Host
from webapp.jobs.models import Event
from webapp.live.publish import publish_host_checks

WANTS_RECHECK = "wants_recheck"


def checks_update(host_id: str, **changes: Any) -> dict[str, Any]:
    """Update keys of ``Host.checks`` and return the whole; None deletes a key."""
    with transaction.atomic():
        host = Host.objects.select_for_update(no_key=True).only("checks").get(pk=host_id)
        merged = host.checks | changes
        checks = {name: value for name, value in merged.items() if value is not None}
        Host.objects.filter(pk=host_id).update(checks=checks)
    return checks


def recheck_request(*, host: Host, by: str) -> None:
    """Request new facts from a host at its next heartbeat and a new round trip of its queue."""
    with transaction.atomic():
        host.checks = checks_update(host.pk, **{WANTS_RECHECK: True, "queue": None})
        Event.objects.create(
            at=now(), team_id=host.team_id, kind="host.rechecked", subject=host.pk, actor=by
        )
    publish_host_checks(host)
