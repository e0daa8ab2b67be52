"""App registration."""

from django.apps import AppConfig


class DatasetsConfig(AppConfig):
    """Uploaded training data."""

    name = "webapp.datasets"
    label = "datasets"
