"""Base classes of admin pages: read-only records, and optimistic locking of forms."""

from typing import Any, TypeVar, cast

from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import ValidationError
from django.db import models
from django.forms import ModelForm, model_to_dict
from django.http import HttpRequest, HttpResponse

from webapp.core.stale import SEEN, changed_words, mark_of

# Read-only admin for tables of records.


class ReadOnlyAdmin(admin.ModelAdmin[Any]):
    """ModelAdmin that lists and shows rows, without add, change or delete."""

    def has_add_permission(self, _request: HttpRequest) -> bool:
        """Return False."""
        return False

    def has_change_permission(self, _request: HttpRequest, _obj: object = None) -> bool:
        """Return False."""
        return False

    def has_delete_permission(self, _request: HttpRequest, _obj: object = None) -> bool:
        """Return False."""
        return False


# Optimistic locking of admin forms: reject a save if the row changed since the form opened.
#
# A change form carries the version mark of its values, as the site's own forms do
# (``webapp.core.stale``). ``templates/admin/change_form.html`` renders it.


Row = TypeVar("Row", bound=models.Model)
SET_BY_THE_SITE = frozenset({"last_login", "password"})  # changes of these are ignored


class FreshAdmin(admin.ModelAdmin[Row]):
    """ModelAdmin that rejects a save over a change that the form did not show."""

    def get_form(
        self,
        request: HttpRequest,
        obj: Row | None = None,
        change: bool = False,  # noqa: FBT001, FBT002 (Django's signature)
        **kwargs: Any,
    ) -> Any:  # noqa: ANN401 (Django's signature)
        """Return the form, which compares its initial values with the current ones."""
        form = super().get_form(request, obj, change=change, **kwargs)
        seen = request.POST.get(SEEN, "")
        if obj is None or not seen:
            return form
        owner, shown = self, obj

        class FreshForm(form):  # type: ignore[misc, valid-type]  # made anew for each request
            def clean(self) -> Any:  # noqa: ANN401 (Django's signature)
                cleaned = super().clean()
                owner.refuse_stale(request, shown, seen, self)
                return cleaned

        return FreshForm

    def shown_values(self, obj: Row, fields: list[str]) -> object:
        """Return the values of a form as JSON."""
        chosen = [name for name in fields if name not in SET_BY_THE_SITE]
        values = model_to_dict(obj, fields=chosen)
        return {name: _plain(value) for name, value in values.items()}

    def refuse_stale(
        self, request: HttpRequest, obj: Row, seen: str, form: ModelForm[Row]
    ) -> None:
        """Compare the marks under the row's lock, which is held until the form is stored.

        Raises:
            ValidationError: somebody changed the row; the message says who and when.
        """
        now_there = self.model._default_manager.select_for_update().get(pk=obj.pk)  # noqa: SLF001 (documented)
        if mark_of(self.shown_values(now_there, list(form.base_fields))) == seen:
            return
        entries = LogEntry.objects.filter(
            content_type=ContentType.objects.get_for_model(self.model), object_id=str(obj.pk)
        )
        last = entries.select_related("user").order_by("-action_time").first()
        by = last.user.get_username() if last else ""
        reader = request.user.get_username()
        words = changed_words("It was", by, last.action_time if last else None, reader=reader)
        raise ValidationError(
            f"{words} Your change was not saved. Open it again to see the current values, and "
            "make your change there."
        )

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Render the form with the version mark of its values."""
        obj = kwargs.get("obj")
        if obj is not None:
            fields = list(context["adminform"].form.base_fields)
            posted = request.POST.get(SEEN, "")
            context[SEEN] = posted or mark_of(self.shown_values(cast("Row", obj), fields))
        return super().render_change_form(request, context, *args, **kwargs)


def _plain(value: object) -> object:
    """Return the sorted keys of a list of rows; any other value unchanged."""
    if isinstance(value, list) and all(isinstance(each, models.Model) for each in value):
        return sorted(str(each.pk) for each in value)
    return value
