"""Who holds which devices: the whole gang or nothing, one writer per pool.

On SQLite every transaction begins as a writer, so that there is one at a time. On PostgreSQL
an advisory lock on the pool does the same around taking and releasing.
"""

import zlib
from collections.abc import Iterable

from django.db import connection, transaction

from webapp.core.clock import now
from webapp.hosts.models import Device
from webapp.jobs.models import Allocation, Attempt

NUM_HARDWARE_LOCKS = 16  # few, so that a round of thousands of devices fills no lock table


def pool_lock(pool_id: str) -> None:
    """Wait until nobody else takes or releases devices of the pool, until the transaction ends.

    Any other id, such as a team's, is a lock of its own.
    """
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [pool_id])


def hardware_lock(devices: Iterable[Device]) -> None:
    """Wait until nobody else gives out this hardware through another host, maybe of another pool.

    The last locks that a transaction takes, always in the same order.
    """
    names = {device.hardware for device in devices} - {""}
    for number in sorted({zlib.crc32(name.encode()) % NUM_HARDWARE_LOCKS for name in names}):
        pool_lock(f"hardware {number}")


def devices_take(*, attempt: Attempt, devices: Iterable[Device]) -> None:
    """Let an attempt hold devices of its host.

    Raises:
        IntegrityError: another attempt holds one of them.
    """
    instant = now()
    Allocation.objects.bulk_create(
        Allocation(device=device, attempt=attempt, taken_at=instant) for device in devices
    )


def devices_release(attempt: Attempt) -> int:
    """Free what an attempt that has ended holds; return how many devices that were."""
    held = Allocation.objects.filter(attempt=attempt, released_at=None)
    with transaction.atomic():
        pool_lock(attempt.job.pool_id)
        return held.update(released_at=now())
