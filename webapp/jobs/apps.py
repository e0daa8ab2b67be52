"""App registration."""

from django.apps import AppConfig


class JobsConfig(AppConfig):
    """Jobs, attempts, events, artefacts, measurements."""

    name = "webapp.jobs"
    label = "jobs"
