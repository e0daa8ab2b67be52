"""The chain, to read."""

from django.contrib import admin

from webapp.audit.models import Cut, Link
from webapp.core.read_only import ReadOnlyAdmin


@admin.register(Link)
class LinkAdmin(ReadOnlyAdmin):
    """Seals of events."""

    list_display = ["position", "event_id", "digest"]


@admin.register(Cut)
class CutAdmin(ReadOnlyAdmin):
    """Where old history was cut off."""

    list_display = ["position", "num_events", "at", "digest"]
