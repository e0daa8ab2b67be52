"""The metric store's sources; points themselves are read through charts."""

from django.contrib import admin

from webapp.core.read_only import ReadOnlyAdmin
from webapp.metrics.models import MetricSource


@admin.register(MetricSource)
class MetricSourceAdmin(ReadOnlyAdmin):
    """How far each source is stored and sealed."""

    list_display = ["attempt_id", "source", "sealed_through_seq", "last_received_at"]
    search_fields = ["attempt_id"]
