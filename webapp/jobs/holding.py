"""Take and release devices: a whole gang or nothing, one writer per pool.

On SQLite every transaction begins as a writer, so that there is one at a time. On PostgreSQL
an advisory lock on the pool serialises taking and releasing.
"""

import zlib
from collections.abc import Iterable

from django.db import connection, transaction

from webapp.core.clock import now
from webapp.hosts.models import Device
from webapp.jobs.models import Allocation, Attempt

NUM_HARDWARE_LOCKS = 16  # few, so that thousands of devices do not fill the lock table


def pool_lock(pool_id: str) -> None:
    """Lock a pool's devices until the transaction ends.

    Any other id, such as a team's, is a separate lock.
    """
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [pool_id])


def hardware_lock(devices: Iterable[Device]) -> None:
    """Lock hardware that other hosts, possibly of other pools, may allocate too.

    These are the last locks of a transaction, always taken in the same order.
    """
    names = {device.hardware for device in devices} - {""}
    for number in sorted({zlib.crc32(name.encode()) % NUM_HARDWARE_LOCKS for name in names}):
        pool_lock(f"hardware {number}")


def devices_take(*, attempt: Attempt, devices: Iterable[Device]) -> None:
    """Allocate devices of its host to an attempt.

    Raises:
        IntegrityError: another attempt holds one of them.
    """
    instant = now()
    Allocation.objects.bulk_create(
        Allocation(device=device, attempt=attempt, taken_at=instant) for device in devices
    )


def devices_release(attempt: Attempt) -> int:
    """Release the devices of an ended attempt; return their number."""
    allocations = Allocation.objects.filter(attempt=attempt, released_at=None)
    with transaction.atomic():
        pool_lock(attempt.job.pool_id)
        return allocations.update(released_at=now())
