"""Admin of teams, memberships, quotas and sessions."""

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from webapp.accounts.models import LoginTry, Membership, OpenSession, Quota, Team
from webapp.accounts.people_admin import RoleForm, form_for_admin
from webapp.core.fresh_admin import FreshAdmin
from webapp.core.read_only import ReadOnlyAdmin


class MembershipInline(admin.TabularInline[Membership, Team]):
    """A team's members on the team's own page."""

    model = Membership
    form = RoleForm
    extra = 1
    autocomplete_fields = ["user"]

    def get_formset(self, request: HttpRequest, obj: Team | None = None, **kwargs: Any) -> Any:  # noqa: ANN401 (Django's signature)
        """Return the formset with the user's restrictions."""
        return super().get_formset(
            request, obj, **{**kwargs, "form": form_for_admin(request, RoleForm)}
        )


@admin.register(Team)
class TeamAdmin(FreshAdmin[Team]):
    """Teams with their members."""

    list_display = ["name", "created_at"]
    search_fields = ["name"]
    inlines = [MembershipInline]

    def shown_values(self, obj: Team, fields: list[str]) -> object:
        """Return the team's values with its members, which the same page edits."""
        members = Membership.objects.filter(team=obj).order_by("pk")
        return [super().shown_values(obj, fields), list(members.values_list("user", "role"))]


@admin.register(Quota)
class QuotaAdmin(FreshAdmin[Quota]):
    """Quotas per team."""

    list_display = ["team", "max_devices", "max_gpu_hours_per_month", "max_duration_seconds"]


@admin.register(Membership)
class MembershipAdmin(FreshAdmin[Membership]):
    """All memberships."""

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
        """Return the form with the user's restrictions."""
        form = form_for_admin(request, RoleForm)
        return super().get_form(request, obj, change=change, **{**kwargs, "form": form})


@admin.register(LoginTry)
class LoginTryAdmin(ReadOnlyAdmin):
    """Recent failed login attempts."""

    list_display = ["at", "address"]


@admin.register(OpenSession)
class OpenSessionAdmin(ReadOnlyAdmin):
    """Open sessions with user, address and browser."""

    list_display = ["user", "address", "browser", "began_at", "seen_at"]
    exclude = ["session_key"]
