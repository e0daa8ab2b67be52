"""Models of the hash chain over the event history."""

from django.db import models


class Link(models.Model):
    """The seal of one event: SHA-256 over the previous link and the event's content."""

    position = models.PositiveBigIntegerField(primary_key=True)
    event_id = models.BigIntegerField(unique=True)  # no foreign key, so that nothing cascades
    digest = models.CharField(max_length=64)

    class Meta:
        ordering = ["position"]

    def __str__(self) -> str:
        return f"{self.position}:{self.digest}"


class Cut(models.Model):
    """A cut of the chain: earlier events were deleted by retention.

    The event of the cut is sealed in the remaining part, so that a cut is always visible.
    """

    position = models.PositiveBigIntegerField(primary_key=True)  # of the last deleted link
    digest = models.CharField(max_length=64)  # of that link, to which the next one is chained
    event_id = models.BigIntegerField(unique=True)  # the sealed event of the cut
    num_events = models.PositiveBigIntegerField()
    at = models.DateTimeField()

    class Meta:
        ordering = ["position"]

    def __str__(self) -> str:
        return f"{self.position}:{self.digest}"
