"""``manage.py epoch show`` and ``epoch raise``: after a backup was restored."""

import getpass
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from webapp.hosts.epoch import RESTORED, epoch, epoch_raise, is_restored
from webapp.hosts.models import Host


class Command(BaseCommand):
    """Say whether the database is a backup, and go on with it."""

    help = "Show the site's epoch and what hosts have seen, or raise it after a restoration."

    def add_arguments(self, parser: CommandParser) -> None:
        """Take what to do."""
        parser.add_argument("what", choices=["show", "raise"])

    def handle(self, *_args: object, **options: Any) -> None:
        """Print where the site stands, before and after."""
        if options["what"] == "raise":
            ended = epoch_raise(by=f"system:{getpass.getuser()}")
            for host in ended:
                self.stdout.write(f"{host.name} enrols again: it had not seen the newest epoch.")
        known = epoch()
        self.stdout.write(f"This site's epoch is {known.number}.")
        if is_restored():
            num_hosts = Host.objects.filter(epoch_seen=known.highest_seen).count()
            self.stdout.write(f"{num_hosts} hosts have seen {known.highest_seen}. {RESTORED}")
