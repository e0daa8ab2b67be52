"""App registration."""

from django.apps import AppConfig


class CoreConfig(AppConfig):
    """App of the shared code: template tags and management commands."""

    name = "webapp.core"
    label = "core"
