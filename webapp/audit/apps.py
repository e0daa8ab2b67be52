"""App registration."""

from django.apps import AppConfig
from django.db.models.signals import post_migrate

from webapp.audit.guard import guards_set


class AuditConfig(AppConfig):
    """Hash chain over the event history."""

    name = "webapp.audit"
    label = "audit"

    def ready(self) -> None:
        """Create the triggers after every migration, because rebuilt tables lose theirs."""
        post_migrate.connect(guards_set, sender=self, dispatch_uid="audit_guards")
