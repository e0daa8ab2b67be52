"""Plans: computed, so read only."""

from django.contrib import admin

from webapp.core.read_only import ReadOnlyAdmin
from webapp.plans.models import Plan


@admin.register(Plan)
class PlanAdmin(ReadOnlyAdmin):
    """What was asked and what was answered."""

    list_display = ["name", "state", "team", "owner", "created_at", "computed_at"]
    list_filter = ["state", "team"]
    search_fields = ["id", "name"]
