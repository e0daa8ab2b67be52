"""Read-only admin pages of jobs and their data; changes go through the services."""

from typing import ClassVar

from django.contrib import admin

from webapp.core.admin_base import ReadOnlyAdmin
from webapp.jobs.models import (
    Allocation,
    Artefact,
    Attempt,
    AttemptEvent,
    CalibrationChange,
    Command,
    Event,
    Job,
    Measurement,
)


@admin.register(Job)
class JobAdmin(ReadOnlyAdmin):
    """Jobs, including deleted ones."""

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
    """Attempts, with their counters."""

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
    """Devices held by attempts, with times."""

    list_display = ["device", "attempt", "taken_at", "released_at"]
    list_select_related: ClassVar = ["device", "attempt"]


@admin.register(AttemptEvent)
class AttemptEventAdmin(ReadOnlyAdmin):
    """Stored events, by sequence number."""

    list_display = ["attempt", "seq", "kind", "received_at"]
    list_filter = ["kind"]
    search_fields = ["attempt__id"]


@admin.register(Event)
class EventAdmin(ReadOnlyAdmin):
    """The audit log: who did what, when and why."""

    list_display = ["at", "kind", "subject", "from_state", "to_state", "reason", "actor"]
    list_filter = ["kind", "to_state"]
    search_fields = ["subject", "actor"]


@admin.register(Command)
class CommandAdmin(ReadOnlyAdmin):
    """Wake-up commands, with their retries."""

    list_display = ["id", "host", "kind", "state", "tries", "next_at"]
    list_filter = ["state", "kind"]


@admin.register(Artefact)
class ArtefactAdmin(ReadOnlyAdmin):
    """Artefacts of attempts."""

    list_display = ["name", "kind", "attempt", "total_bytes", "is_complete"]
    list_filter = ["kind", "is_complete"]


@admin.register(Measurement)
class MeasurementAdmin(ReadOnlyAdmin):
    """Measurements with their predictions."""

    list_display = [
        "metric",
        "ratio",
        "is_excluded",
        "invalid_reason",
        "host",
        "job",
        "measured_at",
    ]
    list_filter = ["metric", "is_excluded", "decision", "host"]


@admin.register(CalibrationChange)
class CalibrationChangeAdmin(ReadOnlyAdmin):
    """Changes of calibration factors by runs and people."""

    list_display = ["at", "cause", "host", "job", "actor", "why"]
    list_filter = ["cause", "host"]
