"""``manage.py ensure_admin``: make the first account, and say its password once."""

from django.core.management.base import BaseCommand

from webapp.accounts.services import ADMIN_NAME, admin_ensure


class Command(BaseCommand):
    """Create user ``admin`` of the home team; say nothing when there is an admin."""

    help = "Create the first admin account and print its password, once."

    def handle(self, *_args: object, **_options: object) -> None:
        """Print the password of an account that was just made."""
        password = admin_ensure()
        if password is not None:
            self.stdout.write(f"user: {ADMIN_NAME}")
            self.stdout.write(f"password: {password}")
