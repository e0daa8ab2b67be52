"""``manage.py enrol_token``: make a one-time token with which a machine becomes a host."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from webapp.accounts.models import Team
from webapp.hosts.services import token_create


class Command(BaseCommand):
    """Print enrolment tokens and nothing else, so that a script can pass them on."""

    help = "Print one-time enrolment tokens, valid for an hour, a line each."

    def add_arguments(self, parser: CommandParser) -> None:
        """Take the host's name, its pool and its team."""
        parser.add_argument("--name", default="", help="what the host will be called")
        parser.add_argument("--pool", default="default")
        parser.add_argument("--team", default="", help="name of the team; default: the first")
        parser.add_argument("--count", type=int, default=1, help="how many; a rack's, at once")

    def handle(self, *_args: object, **options: Any) -> None:
        """Write the tokens' texts."""
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
