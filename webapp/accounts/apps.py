"""App registration."""

from django.apps import AppConfig
from django.contrib.auth.signals import user_logged_in
from django.db.models.signals import post_delete, post_save, pre_save


class AccountsConfig(AppConfig):
    """Accounts and permissions: teams, roles, memberships."""

    name = "webapp.accounts"
    label = "accounts"

    def ready(self) -> None:
        """Connect the signals that record logins, end sessions and keep an administrator."""
        # The models are not loaded yet when this module is imported.
        from django.contrib.auth.models import User

        from webapp.accounts.services import last_administrator_keep, somebody_left
        from webapp.accounts.sign_in import closed_account_leave, session_note

        user_logged_in.connect(session_note, dispatch_uid="session_note")
        pre_save.connect(last_administrator_keep, sender=User, dispatch_uid="last_admin_saved")
        post_save.connect(closed_account_leave, sender=User, dispatch_uid="closed_account")
        post_delete.connect(somebody_left, sender=User, dispatch_uid="last_admin_deleted")
