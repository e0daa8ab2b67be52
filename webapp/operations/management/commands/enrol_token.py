"""``manage.py enrol_token``: create one-time tokens that enrol hosts."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from webapp.accounts.models import Team
from webapp.hosts.services import token_create


class Command(BaseCommand):
    """Print enrolment tokens and nothing else, for scripts."""

    requires_system_checks = ()  # they load every page, which is not needed here
    help = "Print one-time enrolment tokens, valid for an hour, a line each."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the host's name, pool and team, and the number of tokens."""
        parser.add_argument("--name", default="", help="what the host will be called")
        parser.add_argument("--pool", default="default")
        parser.add_argument("--team", default="", help="name of the team; default: the first")
        parser.add_argument("--count", type=int, default=1, help="how many; a rack's, at once")

    def handle(self, *_args: object, **options: Any) -> None:
        """Create the tokens and print their texts."""
        name = options["team"]
        teams = Team.objects.filter(name=name) if name else Team.objects.order_by("created_at")
        team = teams.first()
        if team is None:
            raise CommandError(
                f"There is no team {name!r}."
                if name
                else "There is no team yet. Run `python3 manage.py ensure_admin` first."
            )
        for _ in range(options["count"]):
            _, text = token_create(team=team, by=None, name=options["name"], pool=options["pool"])
            self.stdout.write(text)
