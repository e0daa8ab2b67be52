"""Admin page of the metric store's sources; points are shown in charts."""

from django.contrib import admin

from webapp.core.admin_base import ReadOnlyAdmin
from webapp.metrics.models import MetricSource


@admin.register(MetricSource)
class MetricSourceAdmin(ReadOnlyAdmin):
    """Stored and sealed progress of each source."""

    list_display = ["attempt_id", "source", "sealed_through_seq", "last_received_at"]
    search_fields = ["attempt_id"]
