"""Django's admin with a recent password check and an event for every write."""

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any

import structlog
from django.conf import settings
from django.contrib.admin import AdminSite, ModelAdmin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import BaseModelAdmin
from django.contrib.admin.widgets import AutocompleteSelect
from django.contrib.auth.decorators import login_not_required
from django.contrib.messages import ERROR
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import models, transaction
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.decorators import method_decorator

from webapp.accounts.networks import lies_in
from webapp.accounts.sign_in import (
    AUTHENTICATED_AT,
    CLOCK_TOLERANCE,
    GuardedLogin,
    address_of,
)
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.middleware import redirect_to_own

log = structlog.get_logger(__name__)
RECENT_SECONDS = 15 * 60
LONGEST_PATH = 200
LONGEST_KEY = 40  # shown of a key that is none


# Keys in requests that no row can have: Django's admin would ask the database for them, and fail.


def is_key(field: "models.Field[Any, Any]", text: object) -> bool:
    """Return whether a text can be a value of a key."""
    try:
        field.to_python(text)
    except ValidationError:
        return False
    return True


class KeySelect(AutocompleteSelect):
    """A select of a row by its key, which shows none for what is no key."""

    def optgroups(self, name: str, value: Sequence[str], attr: Any = None) -> Any:  # noqa: ANN401 (Django's signature)
        """Return the options of the values that can be keys."""
        return super().optgroups(
            name,
            [each for each in value if not each or is_key(self.field.target_field, each)],
            attr,
        )


class KeyFields(BaseModelAdmin):  # type: ignore[type-arg] # of any model
    """Mixin of admin classes whose selects show a form again, whatever key was sent."""

    def formfield_for_foreignkey(
        self,
        db_field: Any,  # noqa: ANN401 (Django's signature)
        request: HttpRequest,
        **kwargs: Any,
    ) -> Any:  # noqa: ANN401 (Django's signature)
        """Return the form field of a foreign key."""
        if db_field.name in self.get_autocomplete_fields(request):
            kwargs.setdefault("widget", KeySelect(db_field, self.admin_site))
        return super().formfield_for_foreignkey(db_field, request, **kwargs)


class KeyActions(KeyFields, ModelAdmin):  # type: ignore[type-arg] # of any model
    """Mixin of every ``ModelAdmin``: an action on what is no key is refused by words."""

    def response_action(self, request: HttpRequest, queryset: "QuerySet[Any]", *args: Any) -> Any:  # noqa: ANN401 (Django's signature)
        """Return the response of an action on the chosen rows, or None after a message."""
        key = self.model._meta.pk
        chosen = request.POST.getlist(ACTION_CHECKBOX_NAME)
        wrong = next((each for each in chosen if not is_key(key, each)), None)
        if wrong is not None:
            name = self.model._meta.verbose_name_plural
            words = f"“{wrong[:LONGEST_KEY]}” is no key of {name}. Choose rows of the list."
            self.message_user(request, words, ERROR)
            return None
        return super().response_action(request, queryset, *args)


class StaffSite(AdminSite):
    """Admin site for staff who entered their password recently."""

    def register(
        self,
        model_or_iterable: Any,  # noqa: ANN401 (Django's signature)
        admin_class: Any = None,  # noqa: ANN401 (Django's signature)
        **options: Any,
    ) -> None:
        """Register models with an admin class that checks the keys in requests."""
        given = admin_class or ModelAdmin
        body = {"__module__": given.__module__, "__doc__": given.__doc__}
        checked = type(given.__name__, (KeyActions, given), body)
        super().register(model_or_iterable, checked, **options)

    def has_permission(self, request: HttpRequest) -> bool:
        """Return whether the user is staff, in an allowed network, and confirmed recently."""
        is_near = lies_in(address_of(request), settings.ADMIN_NETWORKS)
        return is_near and super().has_permission(request) and was_confirmed(request)

    @method_decorator(login_not_required)
    def login(
        self,
        request: HttpRequest,
        extra_context: dict[str, Any] | None = None,  # noqa: ARG002 (Django's signature)
    ) -> Any:  # noqa: ANN401 (Django's signature)
        """Show the product's login page, which limits attempts."""
        check_network(request)
        if self.has_permission(request):
            after = request.GET.get("next", "")
            return redirect_to_own(request, after, reverse("admin:index"))
        if request.user.is_authenticated and not super().has_permission(request):
            raise PermissionDenied("The administration is for staff alone.")
        context = {"again": request.user.is_authenticated}
        initial = {"username": request.user.get_username()}
        return GuardedLogin.as_view(extra_context=context, initial=initial)(request)

    def password_change(
        self,
        request: HttpRequest,  # noqa: ARG002 (Django's signature)
        extra_context: dict[str, Any] | None = None,  # noqa: ARG002 (Django's signature)
    ) -> Any:  # noqa: ANN401 (Django's signature)
        """Redirect to the product's password page, which limits attempts and ends sessions."""
        return redirect("password")

    def admin_view(self, view: Callable[..., Any], cacheable: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002 (Django's signature)
        """Wrap a view so that a write and its event share one transaction."""
        guarded = super().admin_view(view, cacheable)

        def recorded(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (the view's)
            check_network(request)
            if request.method in {"GET", "HEAD", "OPTIONS"} or not self.has_permission(request):
                return guarded(request, *args, **kwargs)
            with transaction.atomic():
                response = guarded(request, *args, **kwargs)
                if response.status_code == HttpResponse(status=302).status_code:
                    admin_write_record(request)
            return response

        return update_wrapper(recorded, guarded)


def check_network(request: HttpRequest) -> None:
    """Check that the request comes from an allowed network.

    Raises:
        Http404: the address is in none of the allowed networks; it is logged.
    """
    address = address_of(request)
    if not lies_in(address, settings.ADMIN_NETWORKS):
        log.warning("administration requested from another network", address=address)
        raise Http404("Nothing is here.")


def was_confirmed(request: HttpRequest) -> bool:
    """Return whether the password was entered in this session within the last 15 minutes.

    One that was entered in the future, before the clock was set back, does not count.
    """
    age_seconds = now().timestamp() - request.session.get(AUTHENTICATED_AT, 0)
    return bool(-CLOCK_TOLERANCE.total_seconds() <= age_seconds < RECENT_SECONDS)


def admin_write_record(request: HttpRequest) -> None:
    """Record user, path and field names of an admin write; values may be secret."""
    fields = sorted(set(request.POST) - {"csrfmiddlewaretoken"})
    Event.objects.create(
        at=now(),
        team_id="",
        kind="admin.write",
        subject="",
        actor=request.user.get_username()[:80],
        detail={"path": request.path[:LONGEST_PATH], "fields": fields[:100]},
    )
