"""``manage.py house``: print the figures that the code rules set goals for."""

from typing import Any

from django.core.management.base import BaseCommand

from webapp.boot import census


class Command(BaseCommand):
    """Count tests, function and file lengths, and typed functions."""

    requires_system_checks = ()  # it must work in any state of the files
    help = "Print the figures of the house rules: tests, lengths, typed share, test/code ratio."

    def handle(self, *_arguments: Any, **_options: Any) -> None:
        """Print one figure per line."""
        for name, figure in census.report(census.take()).items():
            self.stdout.write(f"{name:28} {figure:>10,}")
