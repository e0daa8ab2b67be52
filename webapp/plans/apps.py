"""App registration."""

from django.apps import AppConfig


class PlansConfig(AppConfig):
    """Saved plans and the wizard drafts they grow from."""

    name = "webapp.plans"
    label = "plans"
