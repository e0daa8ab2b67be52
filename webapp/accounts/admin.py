"""Teams and who belongs to them, with which role."""

from django.contrib import admin

from webapp.accounts.models import Membership, Quota, Team


class MembershipInline(admin.TabularInline[Membership, Team]):
    """A team's members on the team's own page."""

    model = Membership
    extra = 1
    autocomplete_fields = ["user"]


@admin.register(Team)
class TeamAdmin(admin.ModelAdmin[Team]):
    """Teams with their members."""

    list_display = ["name", "created_at"]
    search_fields = ["name"]
    inlines = [MembershipInline]


@admin.register(Quota)
class QuotaAdmin(admin.ModelAdmin[Quota]):
    """How much each team may have."""

    list_display = ["team", "max_devices", "max_gpu_hours_per_month", "max_duration_seconds"]


@admin.register(Membership)
class MembershipAdmin(admin.ModelAdmin[Membership]):
    """Every role that anyone holds."""

    list_display = ["user", "team", "role"]
    list_filter = ["role", "team"]
    autocomplete_fields = ["user", "team"]
