"""Read-only admin for tables of records."""

from typing import Any

from django.contrib import admin
from django.http import HttpRequest


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
