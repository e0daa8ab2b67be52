"""``manage.py backup PATH``: back up everything that the site needs, while it runs."""

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from webapp.core import display
from webapp.operations.backup import KEYS, create
from webapp.operations.database_copies import BackupError


class Command(BaseCommand):
    """Write one backup."""

    requires_system_checks = ()
    help = "Write databases, keys and files into a new folder while the site runs, and verify it."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the folder and what to exclude."""
        parser.add_argument("path", type=Path, help="a folder that does not exist yet")
        parser.add_argument(
            "--without-artefacts",
            action="store_true",
            help="leave out what jobs made (weights, answers); uploaded training data stays in",
        )

    def handle(self, *_args: object, **options: Any) -> None:
        """Create the backup; print its contents and the keys that it lacks."""
        folder: Path = options["path"].resolve()
        try:
            manifest = create(folder, with_artefacts=not options["without_artefacts"])
        except BackupError as error:
            raise CommandError(str(error)) from error
        num_rows = sum(sum(tables.values()) for tables in manifest.rows.values())
        self.stdout.write(
            f"Backup of Slipway {manifest.version} ({manifest.engine}) in {folder}: "
            f"{num_rows:,} rows, {len(manifest.files):,} files, "
            f"{display.memory(manifest.num_bytes)}; all read again and found whole."
        )
        self.stdout.write(f"Schema: {', '.join(manifest.schema_names)}")
        if not manifest.has_artefacts:
            self.stdout.write("Left out: the artefacts of jobs.")
        for variable in manifest.environment_keys:
            self.stdout.write(f"Not in it: the key in {variable}. Keep it elsewhere.")
        inside = [name for name in KEYS if f"files/{name}" in manifest.files]
        if inside:
            self.stdout.write(f"It holds keys ({', '.join(inside)}): keep it closed to others.")
