"""Database indexes of jobs: each covers one page's query without reading the wide rows.

SQLite also needs the columns of an index's condition in the index; tests on both databases
check which index serves which query.
"""

from django.db.models import F, Index, Q
from django.db.models.lookups import IsNull

# Jobs without a rank sort after ranked ones, on every database.
IN_TURN = (
    F("priority").desc(),
    IsNull(F("queue_rank"), True),  # noqa: FBT003 -- the lookup's own signature
    F("queue_rank"),
    F("queued_at"),
    F("id"),
)

OF_JOBS = [
    Index(  # the list's filters
        fields=[
            "team",
            "-created_at",
            "-id",
            "state",
            "kind",
            "owner",
            "host",
            "requested_host",
            "name",
            "model_name",
            "deleted_at",
        ],
        condition=Q(deleted_at=None),
        name="jobs_listed",
    ),
    Index(  # the newest jobs of a host, and of those queued for it
        fields=["host", "-created_at", "-id", "team", "requested_host", "deleted_at"],
        condition=Q(deleted_at=None),
        name="jobs_of_host",
    ),
    Index(  # latest failures, and counts by state
        fields=["state", "ended_at", "team", "id", "deleted_at"],
        condition=Q(deleted_at=None),
        name="jobs_ended",
    ),
    Index(  # jobs running on hosts or queued for them
        fields=["state", "host", "requested_host", "deleted_at"], name="jobs_at_host"
    ),
    Index(  # counts per pool, and the durations of recent similar jobs
        fields=[
            "pool",
            "state",
            "kind",
            "model_name",
            "-ended_at",
            "started_at",
            "deleted_at",
        ],
        name="jobs_of_pool",
    ),
    Index(fields=["plan", "deleted_at"], name="jobs_of_plan"),
    Index(  # jobs whose measurements no longer count
        fields=["team", "id", "deleted_at"],
        condition=Q(deleted_at__isnull=False),
        name="jobs_deleted",
    ),
    Index(  # each team's part of a queue, in order
        F("pool"),
        F("team"),
        *IN_TURN,
        F("deleted_at"),
        F("state"),
        condition=Q(state="queued", deleted_at=None),
        name="jobs_waiting",
    ),
]

OF_ATTEMPTS = [
    Index(  # running parts of gangs
        fields=["leader", "ended_at", "job", "host"],
        condition=Q(ended_at=None, leader__isnull=False),
        name="attempts_of_gangs",
    ),
]
