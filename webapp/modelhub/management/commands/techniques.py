"""Say of every technique how far it has come: planned, or run by which job and which test."""

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from planner.techniques.registry import TECHNIQUES
from runners.abilities import ABILITIES, level_of


class Command(BaseCommand):
    """Print the techniques."""

    requires_system_checks = ()
    help = "Print every technique: its state, job kind, library with version, and test."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Offer a machine-readable form."""
        parser.add_argument("--json", action="store_true", help="one JSON document instead")

    def handle(self, *_arguments: Any, **options: Any) -> None:
        """Print one line, or one object, a technique."""
        rows = [row_of(key) for key in TECHNIQUES]
        if options["json"]:
            self.stdout.write(json.dumps(rows, indent=2))
            return
        for row in rows:
            through = f"{row['job_kind']}: {row['library']} {row['version']}".strip(": ")
            self.stdout.write(f"{row['id']:28} {row['state']:8} {through}".rstrip())


def row_of(key: str) -> dict[str, str]:
    """Return what is said of one technique."""
    ability = ABILITIES.get(key)
    return {
        "id": key,
        "title": TECHNIQUES[key].title,
        "state": level_of(key),
        "job_kind": ability.job_kind if ability else "",
        "library": ability.library if ability else "",
        "version": ability.version if ability else "",
        "test": ability.test if ability else "",
    }
