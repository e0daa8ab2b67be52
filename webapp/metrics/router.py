"""Database router: metric tables in their own database, the rest in the default one."""

from django.conf import settings
from django.db.models import Model


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
