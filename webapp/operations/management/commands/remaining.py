"""``manage.py remaining``: report the jobs affected by a stop of the site; used by ``up``."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser

from webapp.jobs.services import remaining, remaining_sentences

LOOK_SECONDS = 0.2


class Command(BaseCommand):
    """Report remaining jobs, after a short wait for the exits of this machine's jobs."""

    requires_system_checks = ()  # `up` waits for it
    help = "Say which jobs ended since an instant with the site, run on elsewhere, or wait."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the instant and the waiting time."""
        parser.add_argument("--since", type=float, required=True, help="seconds since 1970")
        parser.add_argument("--wait", type=float, default=0.0, help="seconds for ends to arrive")

    def handle(self, *_args: object, **options: Any) -> None:
        """Print one sentence per line."""
        host_id, since = own_host(), datetime.fromtimestamp(options["since"], UTC)
        deadline = time.monotonic() + options["wait"]
        while (jobs := remaining(host_id, since)).unreported and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        for sentence in remaining_sentences(jobs):
            self.stdout.write(sentence)


def own_host() -> str:
    """Return this machine's id as a host of its own site; "" if it is not enrolled."""
    path = Path(settings.DATA_DIR) / "host" / "credential.json"
    try:
        return str(json.loads(path.read_text("utf-8"))["host_id"])
    except (OSError, ValueError, KeyError):
        return ""
