"""App registration."""

from django.apps import AppConfig


class MetricsConfig(AppConfig):
    """The metric store: journal, sealed chunks, roll-ups."""

    name = "webapp.metrics"
    label = "metrics"
