"""App registration."""

from django.apps import AppConfig


class ModelhubConfig(AppConfig):
    """Models a team brought or made: configs, folders, artefacts of jobs."""

    name = "webapp.modelhub"
    label = "modelhub"
