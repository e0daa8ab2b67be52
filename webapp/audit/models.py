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


class Cut(models.Model):
    """Where the chain was cut: what lies before went by retention, the rest goes on from here.

    The event that says so is sealed in the part that stays, so that a cut is never silent.
    """

    position = models.PositiveBigIntegerField(primary_key=True)  # of the last link that went
    digest = models.CharField(max_length=64)  # of that link: the next one was made from it
    event_id = models.BigIntegerField(unique=True)  # the sealed event that tells of the cut
    num_events = models.PositiveBigIntegerField()
    at = models.DateTimeField()

    class Meta:
        ordering = ["position"]

    def __str__(self) -> str:
        return f"{self.position}:{self.digest}"
