"""``manage.py epoch show`` and ``epoch raise``, for a restored backup."""

import getpass
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from webapp.hosts.epoch import RESTORED, epoch, epoch_raise, is_restored
from webapp.hosts.models import Host


class Command(BaseCommand):
    """Show whether the database is a restored backup, or raise its epoch."""

    requires_system_checks = ()  # they load every page, which is not needed here
    help = "Show the site's epoch and what hosts have seen, or raise it after a restoration."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the action."""
        parser.add_argument("what", choices=["show", "raise"])

    def handle(self, *_args: object, **options: Any) -> None:
        """Raise the epoch if requested, and print the site's epoch and the hosts'."""
        if options["what"] == "raise":
            ended = epoch_raise(by=f"system:{getpass.getuser()}")
            for host in ended:
                self.stdout.write(f"{host.name} enrols again: it had not seen the newest epoch.")
        site = epoch()
        self.stdout.write(f"This site's epoch is {site.number}.")
        if is_restored():
            num_hosts = Host.objects.filter(epoch_seen=site.highest_seen).count()
            self.stdout.write(f"{num_hosts} hosts have seen {site.highest_seen}. {RESTORED}")
