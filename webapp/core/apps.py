"""App registration."""

from django.apps import AppConfig
from django.db.backends.signals import connection_created


class CoreConfig(AppConfig):
    """What every other app builds on."""

    name = "webapp.core"
    label = "core"

    def ready(self) -> None:
        """Give every connection the function of searches, and models their lookups."""
        from webapp.core.search import register_function

        connection_created.connect(register_function, dispatch_uid="folded_search")
