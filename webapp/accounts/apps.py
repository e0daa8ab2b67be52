"""App registration."""

from django.apps import AppConfig
from django.contrib.auth.signals import user_logged_in


class AccountsConfig(AppConfig):
    """Who may see and do what: teams, roles, memberships."""

    name = "webapp.accounts"
    label = "accounts"

    def ready(self) -> None:
        """Take note of every log-in."""
        # Its models are not there yet when this module is loaded.
        from webapp.accounts.session_signals import session_note

        user_logged_in.connect(session_note, dispatch_uid="session_note")
