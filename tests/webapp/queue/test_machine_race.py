"""Schedulers of two teams at once: one machine is never given to both."""

import threading
from collections.abc import Callable, Iterator

import pytest
from django.db import connection, transaction

from tests.webapp.conftest import make_job
from tests.webapp.machines import host_of
from webapp.audit.guard import CUTS, EVENTS, LINKS
from webapp.hosts.models import Host
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.models import Allocation, Job
from webapp.jobs.services import job_submit

pytestmark = [pytest.mark.django_db(transaction=True, databases="__all__")]
LONG_ENOUGH_SECONDS = 2.0  # for a scheduler that waits for nobody
PATIENCE_SECONDS = 120.0


@pytest.fixture
def rivals(team, other_team, alice, charlie) -> Iterator[list[Host]]:
    """Two teams' hosts on one machine, with a job waiting for each."""
    hosts = [host_of(team, "ours"), host_of(other_team, "theirs", user_id=1002)]
    Host.objects.update(state="draining")
    for host, owner in zip(hosts, (alice, charlie), strict=True):
        job_submit(job=make_job(host.team, owner, host), by=owner.username)
    Host.objects.update(state="ready")
    yield hosts
    if connection.vendor == "postgresql":  # which empties no table of the history at a test's end
        with connection.cursor() as cursor:
            for table in (EVENTS, LINKS, CUTS):
                cursor.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER")


def beside(host: Host, given: list[Job]) -> Callable[[], None]:
    """Return what another scheduler does in a connection of its own."""

    def schedule() -> None:
        try:
            given.extend(allocate_pool(host.pool))
        finally:
            connection.close()

    return schedule


def test_a_scheduler_waits_for_another_that_gives_the_same_machine_out(rivals):
    given: list[Job] = []
    other = threading.Thread(target=beside(rivals[1], given))
    with transaction.atomic():
        assert len(allocate_pool(rivals[0].pool)) == 1
        other.start()
        other.join(LONG_ENOUGH_SECONDS)  # nothing of ours is committed, so it cannot see it
        has_waited = other.is_alive()
    other.join(PATIENCE_SECONDS)
    assert (has_waited, given) == (True, [])
    assert Allocation.objects.filter(released_at=None).get().device.host == rivals[0]
