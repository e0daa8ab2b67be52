"""Jobs and all that they left: read here, changed only through the services."""

from typing import ClassVar

from django.contrib import admin

from webapp.core.read_only import ReadOnlyAdmin
from webapp.jobs.models import (
    Allocation,
    Artefact,
    Attempt,
    AttemptEvent,
    Command,
    Event,
    Job,
    Measurement,
)


@admin.register(Job)
class JobAdmin(ReadOnlyAdmin):
    """Every job, deleted ones too."""

    list_display = [
        "name",
        "state",
        "reason",
        "kind",
        "pool",
        "host",
        "owner",
        "team",
        "created_at",
    ]
    list_filter = ["state", "kind", "host", "team"]
    search_fields = ["id", "name", "model_name"]


@admin.register(Attempt)
class AttemptAdmin(ReadOnlyAdmin):
    """Every try of a job, with its counters."""

    list_display = [
        "id",
        "job",
        "number",
        "node_rank",
        "host",
        "acked_seq",
        "claimed_at",
        "ended_at",
    ]
    list_filter = ["host"]
    exclude: ClassVar = ["fence", "claim_id"]


@admin.register(Allocation)
class AllocationAdmin(ReadOnlyAdmin):
    """Which attempt held which device, from when to when."""

    list_display = ["device", "attempt", "taken_at", "released_at"]
    list_select_related: ClassVar = ["device", "attempt"]


@admin.register(AttemptEvent)
class AttemptEventAdmin(ReadOnlyAdmin):
    """What hosts reported, number by number."""

    list_display = ["attempt", "seq", "kind", "received_at"]
    list_filter = ["kind"]
    search_fields = ["attempt__id"]


@admin.register(Event)
class EventAdmin(ReadOnlyAdmin):
    """Who did what, when and why: the audit."""

    list_display = ["at", "kind", "subject", "from_state", "to_state", "reason", "actor"]
    list_filter = ["kind", "to_state"]
    search_fields = ["subject", "actor"]


@admin.register(Command)
class CommandAdmin(ReadOnlyAdmin):
    """Doorbells and how often they rang."""

    list_display = ["id", "host", "kind", "state", "tries", "next_at"]
    list_filter = ["state", "kind"]


@admin.register(Artefact)
class ArtefactAdmin(ReadOnlyAdmin):
    """What attempts left behind."""

    list_display = ["name", "kind", "attempt", "total_bytes", "is_complete"]
    list_filter = ["kind", "is_complete"]


@admin.register(Measurement)
class MeasurementAdmin(ReadOnlyAdmin):
    """Measured beside predicted."""

    list_display = ["metric", "ratio", "predicted", "measured", "host", "job", "measured_at"]
    list_filter = ["metric", "host"]
