"""Admin page of plans, read-only because plans are computed."""

from django.contrib import admin

from webapp.core.admin_base import ReadOnlyAdmin
from webapp.plans.models import Plan


@admin.register(Plan)
class PlanAdmin(ReadOnlyAdmin):
    """Plans with their requests and answers."""

    list_display = ["name", "state", "team", "owner", "created_at", "computed_at"]
    list_filter = ["state", "team"]
    search_fields = ["id", "name"]
