"""Accounts and roles in the administration, where nobody raises themselves."""

from typing import Any, cast

from django import forms
from django.contrib import admin
from django.contrib.auth.admin import UserAdmin
from django.contrib.auth.forms import UserChangeForm
from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User
from django.core.exceptions import ValidationError
from django.http import HttpRequest

from webapp.accounts.models import Membership, OpenSession, Role
from webapp.accounts.standing import (
    LAST_ADMIN,
    OWN_RIGHTS,
    OWN_ROLE,
    is_administrator,
    is_last_administrator,
    may_hold,
)

Form = type[forms.ModelForm[Any]]
FLAGS = ("is_staff", "is_superuser", "is_active")
RIGHTS = ("is_staff", "is_superuser", "groups", "user_permissions")


class RoleForm(forms.ModelForm[Membership]):
    """A membership, filled in by ``asker``."""

    asker: AbstractBaseUser | AnonymousUser

    def clean(self) -> dict[str, Any]:
        """Refuse a role that somebody gives to themselves."""
        found: dict[str, Any] = super().clean() or {}
        user = found.get("user") or getattr(self.instance, "user", None)
        team = found.get("team") or getattr(self.instance, "team", None)
        role = found.get("role")
        if user and team and role and not may_hold(self.asker, user, team, Role(role)):
            self.add_error("role", OWN_ROLE)
        return found


def asked_by(request: HttpRequest, form: Form) -> Form:
    """Return the form as this person fills it in."""
    return cast("Form", type(form.__name__, (form,), {"asker": request.user}))


class AccountForm(UserChangeForm[User]):
    """An account, changed by ``asker``."""

    asker: AbstractBaseUser | AnonymousUser

    def clean(self) -> dict[str, Any]:
        """Refuse to close the last administrator, and rights that somebody gives themselves."""
        found: dict[str, Any] = super().clean() or {}
        after = User(**{name: found.get(name, getattr(self.instance, name)) for name in FLAGS})
        if not is_administrator(after) and is_last_administrator(self.instance):
            raise ValidationError(LAST_ADMIN)
        is_own = self.instance.pk == self.asker.pk
        raised = [name for name in ("is_staff", "is_superuser") if found.get(name)]
        before = User.objects.get(pk=self.instance.pk)
        if is_own and any(not getattr(before, name) for name in raised):
            raise ValidationError(OWN_RIGHTS)
        return found


class AccountAdmin(UserAdmin[User]):
    """Accounts; rights are for superusers to give, and theirs are for superusers to change."""

    form = AccountForm

    def get_form(
        self,
        request: HttpRequest,
        obj: User | None = None,
        change: bool = False,  # noqa: FBT001, FBT002 (Django's signature)
        **kwargs: Any,
    ) -> Any:  # noqa: ANN401 (Django's signature)
        """Return the form as this person fills it in."""
        return asked_by(request, super().get_form(request, obj, change=change, **kwargs))

    def get_readonly_fields(self, request: HttpRequest, obj: User | None = None) -> Any:  # noqa: ANN401 (Django's signature)
        """Let nobody but superusers give rights."""
        fields = tuple(super().get_readonly_fields(request, obj))
        return fields if is_superuser(request) else (*fields, *RIGHTS)

    def has_change_permission(self, request: HttpRequest, obj: User | None = None) -> bool:
        """Keep superusers' accounts, and so their passwords, from everybody else."""
        return super().has_change_permission(request, obj) and _may_touch(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: User | None = None) -> bool:
        """Offer no deletion of the last administrator."""
        if obj is not None and is_last_administrator(obj):
            return False
        return super().has_delete_permission(request, obj) and _may_touch(request, obj)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:  # noqa: ANN401 (Django's signature)
        """Let an account's open sessions, which nobody edits, go with it."""
        going, counts, needed, protected = super().get_deleted_objects(objs, request)
        return going, counts, needed - {OpenSession._meta.verbose_name}, protected


def is_superuser(request: HttpRequest) -> bool:
    """Return whether somebody may do everything."""
    return bool(getattr(request.user, "is_superuser", False))


def _may_touch(request: HttpRequest, obj: User | None) -> bool:
    return obj is None or not obj.is_superuser or is_superuser(request)


admin.site.unregister(User)
admin.site.register(User, AccountAdmin)
