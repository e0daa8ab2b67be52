"""App registration."""

from django.apps import AppConfig


class ModelhubConfig(AppConfig):
    """Models of teams: configs, folders on hosts, artefacts of jobs."""

    name = "webapp.modelhub"
    label = "modelhub"
