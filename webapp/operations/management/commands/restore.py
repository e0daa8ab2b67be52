"""``manage.py restore PATH``: restore a backup into a stopped site."""

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from webapp.operations.backup import check, restore
from webapp.operations.database_copies import BackupError


class Command(BaseCommand):
    """Restore one backup, or only verify it."""

    requires_system_checks = ()
    help = "Verify a backup and put it in place; the site must not run."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the folder and the options."""
        parser.add_argument("path", type=Path, help="a folder that `backup` wrote")
        parser.add_argument(
            "--overwrite",
            action="store_true",
            help="replace a database that is not empty; files that were there are kept aside",
        )
        parser.add_argument("--check", action="store_true", help="verify it and change nothing")

    def handle(self, *_args: object, **options: Any) -> None:
        """Restore or verify the backup, and print the next step."""
        folder: Path = options["path"].resolve()
        try:
            manifest = check(folder)
            made = f"{manifest.made_at:%Y-%m-%d %H:%M} UTC by Slipway {manifest.version}"
            if options["check"]:
                self.stdout.write(f"The backup of {made} is whole and can be restored here.")
                return
            aside = restore(folder, manifest, overwrite=options["overwrite"])
        except BackupError as error:
            raise CommandError(str(error)) from error
        self.stdout.write(f"Restored the backup of {made}.")
        if aside:
            self.stdout.write(
                f"What was there is kept in {aside}; delete it once you have checked the restored "
                "site."
            )
        if not manifest.has_artefacts:
            self.stdout.write("It has no artefacts: models that jobs made cannot be downloaded.")
        self.stdout.write("Start the site with `python3 manage.py up`.")
