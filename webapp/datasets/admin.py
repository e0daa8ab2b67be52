"""Read-only admin of uploaded training data."""

from django.contrib import admin

from webapp.core.admin_base import ReadOnlyAdmin
from webapp.datasets.models import Dataset


@admin.register(Dataset)
class DatasetAdmin(ReadOnlyAdmin):
    """All uploaded files."""

    list_display = ["name", "team", "format", "num_records", "size_bytes", "created_at"]
    list_filter = ["format", "team"]
    search_fields = ["name", "sha256"]
