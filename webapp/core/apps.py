"""App registration."""

from django.apps import AppConfig


class CoreConfig(AppConfig):
    """Clock, identifiers, template tags, commands."""

    name = "webapp.core"
    label = "core"
