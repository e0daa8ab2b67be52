"""Identifiers: ULIDs, which sort by creation time and fit into URLs."""

from django.db import models
from ulid import ULID

ULID_LENGTH = 26


def new_ulid() -> str:
    """Return a new ULID as 26 upper-case characters."""
    return str(ULID())


class UlidModel(models.Model):
    """A table whose primary key is a ULID."""

    id = models.CharField(
        primary_key=True, max_length=ULID_LENGTH, default=new_ulid, editable=False
    )

    class Meta:
        abstract = True
