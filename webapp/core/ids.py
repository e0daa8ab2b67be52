"""Identifiers: ULIDs, which sort by creation and read well in a URL."""

from django.db import models
from ulid import ULID

ULID_LENGTH = 26


def new_ulid() -> str:
    """Return a fresh ULID as 26 upper-case characters."""
    return str(ULID())


class UlidModel(models.Model):
    """A table whose primary key is a ULID."""

    id = models.CharField(
        primary_key=True, max_length=ULID_LENGTH, default=new_ulid, editable=False
    )

    class Meta:
        abstract = True
