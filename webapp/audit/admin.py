"""The chain, to read."""

from django.contrib import admin

from webapp.audit.models import Link
from webapp.core.read_only import ReadOnlyAdmin


@admin.register(Link)
class LinkAdmin(ReadOnlyAdmin):
    """Seals of events."""

    list_display = ["position", "event_id", "digest"]
