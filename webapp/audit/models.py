"""The chain over the history."""

from django.db import models


class Link(models.Model):
    """The seal of one event: SHA-256 over the link before it and the event's own content."""

    position = models.PositiveBigIntegerField(primary_key=True)
    event_id = models.BigIntegerField(unique=True)  # no foreign key: nothing may cascade here
    digest = models.CharField(max_length=64)

    class Meta:
        ordering = ["position"]

    def __str__(self) -> str:
        return f"{self.position}:{self.digest}"
