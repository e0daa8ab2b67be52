"""App registration."""

from django.apps import AppConfig


class HostsConfig(AppConfig):
    """GPU hosts: enrolment, contact, inventory."""

    name = "webapp.hosts"
    label = "hosts"
