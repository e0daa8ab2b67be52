"""``manage.py techniques``: print the state of every technique: planned, runs, or proven."""

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from webapp.bench.technique_states import all_rows


class Command(BaseCommand):
    """Print the techniques and their states."""

    requires_system_checks = ()
    help = "Print every technique: its state, job kind, library, test, and what proves it."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the JSON option."""
        parser.add_argument("--json", action="store_true", help="one JSON document instead")

    def handle(self, *_arguments: Any, **options: Any) -> None:
        """Print one line, or one JSON object, per technique."""
        rows = all_rows()
        if options["json"]:
            self.stdout.write(json.dumps(rows, indent=2))
            return
        for row in rows:
            through = f"{row['job_kind']}: {row['library']} {row['version']}".strip(": ")
            self.stdout.write(f"{row['id']:28} {row['state']:8} {through}".rstrip())
