"""``manage.py prepare``: migrate the databases and create the first account."""

from typing import Any

from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import OperationalError

from webapp.core.queries import migrate_databases


class Command(BaseCommand):
    """Migrate every database, collect static files, create the admin account if missing."""

    requires_system_checks = ()  # they load every page, and this command delays the start
    help = "Migrate every database and create the admin account; safe to repeat."

    def handle(self, *_arguments: Any, **_options: Any) -> None:
        """Do all steps in one process, because `up` waits for it before the first page."""
        try:
            migrate_databases()
        except OperationalError as error:
            raise CommandError(
                f"the database cannot be used: {error}. Check that it runs, and DATABASE_URL "
                "(unset it for SQLite)."
            ) from error
        call_command("collectstatic", interactive=False, verbosity=0)
        call_command("ensure_admin", stdout=self.stdout)
