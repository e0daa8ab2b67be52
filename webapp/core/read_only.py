"""Admin of tables that record what happened: everyone with access reads, nobody edits."""

from typing import Any

from django.contrib import admin
from django.http import HttpRequest


class ReadOnlyAdmin(admin.ModelAdmin[Any]):
    """Lists and shows rows; adds, changes and deletes none."""

    def has_add_permission(self, _request: HttpRequest) -> bool:
        """Refuse."""
        return False

    def has_change_permission(self, _request: HttpRequest, _obj: object = None) -> bool:
        """Refuse."""
        return False

    def has_delete_permission(self, _request: HttpRequest, _obj: object = None) -> bool:
        """Refuse."""
        return False
