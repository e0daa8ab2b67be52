"""``manage.py drill``: queue test jobs that end in a given way, and print their ids."""

from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandError, CommandParser
from pydantic import ValidationError

from runners.jobspec import DrillSpec
from webapp.accounts.models import Membership, Role
from webapp.core.problems import Problem
from webapp.hosts.models import Host
from webapp.jobs.services import job_create, job_submit


class Command(BaseCommand):
    """Queue drills on one host; the server must allow them (``SLIPWAY_DRILLS=1``)."""

    help = "Queue drills on a host: short jobs without a model that end in a requested way."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the host and the fields of a drill."""
        parser.add_argument("host", help="short name (slug) of the host")
        parser.add_argument("--count", type=int, default=1)
        for name, kind, words in (
            ("steps", int, "how many steps"),
            ("step-seconds", float, "how long each takes"),
            ("ending", str, "well, exit_code, signal, oom_gpu or missing_model"),
            ("exit-code", int, "for --ending exit_code"),
            ("signal-number", int, "for --ending signal"),
            ("daemons", int, "processes that it leaves behind"),
            ("log-bytes-per-step", int, "output of each step"),
        ):
            parser.add_argument(f"--{name}", type=kind, help=words)
        parser.add_argument("--ignores-stop", action="store_true", help="does not obey SIGTERM")

    def handle(self, *_args: object, **options: Any) -> None:
        """Create and submit the drills as the first operator of the host's team."""
        host = Host.objects.filter(slug=options["host"]).first()
        if host is None:
            raise CommandError(f"There is no host {options['host']!r}; /hosts/ lists them.")
        owner = _operator_of(host)
        given = {name: options[name] for name in DrillSpec.model_fields if name in options}
        try:
            spec = DrillSpec(**{name: value for name, value in given.items() if value is not None})
            for _ in range(options["count"]):
                draft = job_create(
                    team=host.team, owner=owner, host=host, spec=spec, name="Drill", model_name=""
                )
                self.stdout.write(job_submit(job=draft, by=owner.get_username()).pk)
        except ValidationError as error:
            first = error.errors()[0]
            raise CommandError(f"{first['loc'][0]}: {first['msg']}") from None
        except Problem as problem:
            raise CommandError(problem.detail) from None


def _operator_of(host: Host) -> User:
    roles = [Role.OPERATOR, Role.ADMIN]
    operators = Membership.objects.filter(team=host.team, role__in=roles).select_related("user")
    first = operators.order_by("pk").first()
    if first is None:
        raise CommandError(f"{host.team} has no operator to run a drill for.")
    user: User = first.user
    return user
