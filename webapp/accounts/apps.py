"""App registration."""

from django.apps import AppConfig


class AccountsConfig(AppConfig):
    """Who may see and do what: teams, roles, memberships."""

    name = "webapp.accounts"
    label = "accounts"
