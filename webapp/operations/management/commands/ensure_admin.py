"""``manage.py ensure_admin``: create the first account, and print its password once."""

from django.core.management.base import BaseCommand

from webapp.accounts.services import ADMIN_NAME, admin_ensure


class Command(BaseCommand):
    """Create user ``admin`` of the home team; print nothing if an admin exists.

    The password is an initial one: the first login replaces it, within seven days.
    """

    requires_system_checks = ()  # they load every page, which is not needed here
    help = "Create the first admin account and print its password, once."

    def handle(self, *_args: object, **_options: object) -> None:
        """Create the account if needed, and print its name and password."""
        password = admin_ensure()
        if password is not None:
            self.stdout.write(f"user: {ADMIN_NAME}")
            self.stdout.write(f"password: {password}")
