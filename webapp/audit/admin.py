"""Read-only admin of the chain."""

from django.contrib import admin

from webapp.audit.models import Cut, Link
from webapp.core.admin_base import ReadOnlyAdmin


@admin.register(Link)
class LinkAdmin(ReadOnlyAdmin):
    """Links (hashes) of events."""

    list_display = ["position", "event_id", "digest"]


@admin.register(Cut)
class CutAdmin(ReadOnlyAdmin):
    """Cuts of old history."""

    list_display = ["position", "num_events", "at", "digest"]
