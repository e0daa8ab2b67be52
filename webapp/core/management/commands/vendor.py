"""Fetch the third-party files that the pages serve, or check the committed ones."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from webapp.boot import vendor
from webapp.boot.say import Problem


class Command(BaseCommand):
    """Fetch by `npm pack` and hold every byte to static/vendor/vendor.lock."""

    requires_system_checks = ()  # it tells about the files, whatever state they are in
    help = "Fetch the vendored files from npm and verify them against vendor.lock."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Offer a check without network and a renewal of the lock."""
        parser.add_argument("--check", action="store_true", help="only compare with the lock")
        parser.add_argument("--renew", action="store_true", help="write new digests to the lock")

    def handle(self, *_arguments: Any, **options: Any) -> None:
        """Print what was written, or what differs."""
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
