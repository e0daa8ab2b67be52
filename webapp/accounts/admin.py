"""Admin of accounts, teams, roles, quotas and sessions; nobody raises their own rights."""

from typing import Any, cast

from django import forms
from django.conf import settings
from django.contrib import admin
from django.contrib.auth.admin import UserAdmin
from django.contrib.auth.forms import UserChangeForm
from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User
from django.contrib.messages import ERROR
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from webapp.accounts.models import LoginTry, Membership, OpenSession, Quota, Role, Team
from webapp.accounts.passwords import event_write, link_path
from webapp.accounts.services import (
    LAST_ADMIN,
    OWN_RIGHTS,
    OWN_ROLE,
    is_administrator,
    is_last_administrator,
    may_hold,
)
from webapp.core.admin_base import FreshAdmin, ReadOnlyAdmin
from webapp.core.middleware import uncompressed

# Admin of accounts and roles; nobody can raise their own rights.


Form = type[forms.ModelForm[Any]]
NO_LINK = "it is closed, or a superuser's, which another superuser changes."
FLAGS = ("is_staff", "is_superuser", "is_active")
RIGHTS = ("is_staff", "is_superuser", "groups", "user_permissions")


class RoleForm(forms.ModelForm[Membership]):
    """A membership, edited by ``asker``."""

    asker: AbstractBaseUser | AnonymousUser

    def clean(self) -> dict[str, Any]:
        """Reject a role that the user may not assign to themselves."""
        values: dict[str, Any] = super().clean() or {}
        user = values.get("user") or getattr(self.instance, "user", None)
        team = values.get("team") or getattr(self.instance, "team", None)
        role = values.get("role")
        if user and team and role and not may_hold(self.asker, user, team, Role(role)):
            self.add_error("role", OWN_ROLE)
        return values


def form_for_admin(request: HttpRequest, form: Form) -> Form:
    """Return the form class bound to the user of the request."""
    return cast("Form", type(form.__name__, (form,), {"asker": request.user}))


class AccountForm(UserChangeForm[User]):
    """An account, edited by ``asker``."""

    asker: AbstractBaseUser | AnonymousUser

    def clean(self) -> dict[str, Any]:
        """Reject closing the last administrator, and new rights for one's own account."""
        values: dict[str, Any] = super().clean() or {}
        after = User(**{name: values.get(name, getattr(self.instance, name)) for name in FLAGS})
        if not is_administrator(after) and is_last_administrator(self.instance):
            raise ValidationError(LAST_ADMIN)
        is_own = self.instance.pk == self.asker.pk
        raised = [name for name in ("is_staff", "is_superuser") if values.get(name)]
        before = User.objects.get(pk=self.instance.pk)
        if is_own and any(not getattr(before, name) for name in raised):
            raise ValidationError(OWN_RIGHTS)
        return values


class AccountAdmin(FreshAdmin[User], UserAdmin[User]):
    """Accounts; only superusers can grant rights and change superusers."""

    form = AccountForm
    actions = ("password_link",)

    @admin.action(
        description="Make a link that sets a new password", permissions=["password_link"]
    )
    def password_link(self, request: HttpRequest, chosen: QuerySet[User]) -> HttpResponse | None:
        """Show a password reset link for one account, once; for sites without e-mail."""
        user = chosen.first()
        if chosen.count() != 1 or user is None:
            self.message_user(request, "Choose one account: each gets a link of its own.", ERROR)
            return None
        if not self.has_change_permission(request, user) or not user.is_active:
            self.message_user(request, f"No link is made for {user}: {NO_LINK}", ERROR)
            return None
        actor = request.user.get_username()
        event_write(kind="account.password-link", user=user, actor=actor, way="administration")
        link = request.build_absolute_uri(link_path(user))
        hours = settings.PASSWORD_RESET_TIMEOUT // 3600
        context = {**self.admin_site.each_context(request), "title": "New password"}
        context |= {"account": user, "link": link, "hours": hours}
        response = TemplateResponse(request, "admin/password_link.html", context)
        return uncompressed(response)

    def has_password_link_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may change accounts, and so create links."""
        return super().has_change_permission(request)

    def get_form(
        self,
        request: HttpRequest,
        obj: User | None = None,
        change: bool = False,  # noqa: FBT001, FBT002 (Django's signature)
        **kwargs: Any,
    ) -> Any:  # noqa: ANN401 (Django's signature)
        """Return the form with the user's restrictions."""
        return form_for_admin(request, super().get_form(request, obj, change=change, **kwargs))

    def get_readonly_fields(self, request: HttpRequest, obj: User | None = None) -> Any:  # noqa: ANN401 (Django's signature)
        """Return the read-only fields; includes rights unless the user is a superuser."""
        fields = tuple(super().get_readonly_fields(request, obj))
        return fields if is_superuser(request) else (*fields, *RIGHTS)

    def has_change_permission(self, request: HttpRequest, obj: User | None = None) -> bool:
        """Return whether the user may change the account; superusers' only by superusers."""
        return super().has_change_permission(request, obj) and _may_touch(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: User | None = None) -> bool:
        """Return whether the user may delete the account; never the last administrator."""
        if obj is not None and is_last_administrator(obj):
            return False
        return super().has_delete_permission(request, obj) and _may_touch(request, obj)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:  # noqa: ANN401 (Django's signature)
        """Allow deletion of an account's read-only open sessions together with it."""
        deleted, counts, needed, protected = super().get_deleted_objects(objs, request)
        return deleted, counts, needed - {OpenSession._meta.verbose_name}, protected


def is_superuser(request: HttpRequest) -> bool:
    """Return whether the user is a superuser."""
    return bool(getattr(request.user, "is_superuser", False))


def _may_touch(request: HttpRequest, obj: User | None) -> bool:
    return obj is None or not obj.is_superuser or is_superuser(request)


admin.site.unregister(User)
admin.site.register(User, AccountAdmin)


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
