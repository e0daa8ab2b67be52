"""Teams and who belongs to them, with which role."""

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from webapp.accounts.models import LoginTry, Membership, OpenSession, Quota, Team
from webapp.accounts.people_admin import RoleForm, asked_by
from webapp.core.read_only import ReadOnlyAdmin


class MembershipInline(admin.TabularInline[Membership, Team]):
    """A team's members on the team's own page."""

    model = Membership
    form = RoleForm
    extra = 1
    autocomplete_fields = ["user"]

    def get_formset(self, request: HttpRequest, obj: Team | None = None, **kwargs: Any) -> Any:  # noqa: ANN401 (Django's signature)
        """Return the forms as this person fills them in."""
        return super().get_formset(request, obj, **{**kwargs, "form": asked_by(request, RoleForm)})


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

    def get_form(
        self,
        request: HttpRequest,
        obj: Membership | None = None,
        change: bool = False,  # noqa: FBT001, FBT002 (Django's signature)
        **kwargs: Any,
    ) -> Any:  # noqa: ANN401 (Django's signature)
        """Return the form as this person fills it in."""
        form = asked_by(request, RoleForm)
        return super().get_form(request, obj, change=change, **{**kwargs, "form": form})


@admin.register(LoginTry)
class LoginTryAdmin(ReadOnlyAdmin):
    """Wrong passwords of the last hour."""

    list_display = ["at", "address"]


@admin.register(OpenSession)
class OpenSessionAdmin(ReadOnlyAdmin):
    """Who is logged in, from where."""

    list_display = ["user", "address", "browser", "began_at", "seen_at"]
    exclude = ["session_key"]
