"""App registration."""

from django.apps import AppConfig


class DatasetsConfig(AppConfig):
    """Files of training data that teams uploaded."""

    name = "webapp.datasets"
    label = "datasets"
