"""Tables of metrics, and the router that keeps them in a database of their own."""

from django.conf import settings
from django.db import models
from django.db.models import Model

# ---------------------------------------------------------------------------
# The metric store: a journal of received points, and sealed chunks with their roll-ups.
#
# The tables have their own SQLite file (database alias ``metrics``) so that the ingest writer
# never waits for a web transaction; on PostgreSQL they share the main database. Therefore
# they reference the attempt by id, without a foreign key.
# ---------------------------------------------------------------------------


class MetricSource(models.Model):
    """Stored and sealed progress of one source of one attempt."""

    attempt_id = models.CharField(max_length=26)
    source = models.CharField(max_length=40)
    metrics = models.JSONField(default=list)  # names reported, in order
    sealed_through_seq = models.PositiveBigIntegerField(default=0)
    rolled_through_ms = models.BigIntegerField(default=0)  # roll-ups hold all before it
    clock_offset_ms = models.BigIntegerField(default=0)
    last_received_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["attempt_id", "source"], name="one_source")]

    def __str__(self) -> str:
        return f"{self.attempt_id}/{self.source}"


class MetricBatch(models.Model):
    """Journal row: a received batch; a redelivered batch conflicts and is ignored."""

    pk = models.CompositePrimaryKey("attempt_id", "source", "seq")
    attempt_id = models.CharField(max_length=26)
    source = models.CharField(max_length=40)
    seq = models.PositiveBigIntegerField()  # of the batch's first point
    t0_ms = models.BigIntegerField()
    t1_ms = models.BigIntegerField()
    n = models.PositiveIntegerField()
    received_at = models.DateTimeField()
    body = models.BinaryField()

    def __str__(self) -> str:
        return f"{self.attempt_id}/{self.source} from {self.seq}"


class MetricChunk(models.Model):
    """Sealed history of one metric; ``step_ms`` 0 is raw, 15 000 and 300 000 are roll-ups."""

    pk = models.CompositePrimaryKey("attempt_id", "source", "metric", "step_ms", "t0_ms", "gen")
    attempt_id = models.CharField(max_length=26)
    source = models.CharField(max_length=40)
    metric = models.CharField(max_length=60)
    step_ms = models.PositiveIntegerField()
    t0_ms = models.BigIntegerField()
    gen = models.PositiveIntegerField(default=0)  # counts late chunks over an already sealed range
    t1_ms = models.BigIntegerField()
    n = models.PositiveIntegerField()
    body = models.BinaryField()

    def __str__(self) -> str:
        return f"{self.attempt_id}/{self.source}/{self.metric}"


# ---------------------------------------------------------------------------
# Database router: metric tables in their own database, the rest in the default one.
# ---------------------------------------------------------------------------


class MetricsRouter:
    """Route the metric store to ``settings.METRICS_DATABASE``."""

    def db_for_read(self, model: type[Model], **_hints: object) -> str | None:
        """Return the database that ``model`` is read from, or None for the default."""
        return settings.METRICS_DATABASE if model._meta.app_label == "metrics" else None

    def db_for_write(self, model: type[Model], **_hints: object) -> str | None:
        """Return the database that ``model`` is written to, or None for the default."""
        return self.db_for_read(model)

    def allow_migrate(self, db: str, app_label: str, **_hints: object) -> bool:
        """Return whether ``app_label`` has tables in ``db``."""
        target = settings.METRICS_DATABASE if app_label == "metrics" else "default"
        return db == target
