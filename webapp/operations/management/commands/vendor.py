"""``manage.py vendor``: fetch the third-party static files, or verify the committed ones."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from webapp.boot import vendor
from webapp.boot.console import Problem


class Command(BaseCommand):
    """Fetch with `npm pack` and verify all files against static/vendor/vendor.lock."""

    requires_system_checks = ()  # it must work in any state of the files
    help = "Fetch the vendored files from npm and verify them against vendor.lock."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the offline check and the renewal of the lock."""
        parser.add_argument("--check", action="store_true", help="only compare with the lock")
        parser.add_argument("--renew", action="store_true", help="write new digests to the lock")

    def handle(self, *_arguments: Any, **options: Any) -> None:
        """Print the written files, or fail with the differing ones."""
        if options["check"]:
            if changed := vendor.changed_files():
                raise CommandError(f"Different from vendor.lock: {', '.join(changed)}.")
            self.stdout.write("Every vendored file has the bytes of vendor.lock.")
            return
        try:
            written = vendor.fetch(renew=options["renew"])
        except Problem as problem:
            raise CommandError(str(problem)) from problem
        self.stdout.write("\n".join(f"wrote {path}" for path in written))
