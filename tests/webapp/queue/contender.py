"""A process that submits gangs and stops them again: one of several that want the same devices.

``python -m tests.webapp.queue.contender SEED ROUNDS`` prints a line for each gang.
"""

import os
import random
import sys

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")
django.setup()

from django.contrib.auth.models import User  # noqa: E402 -- after the setup
from django.db import connection  # noqa: E402

from runners.jobspec import TrainSpec  # noqa: E402
from webapp.accounts.models import Team  # noqa: E402
from webapp.hosts.models import Pool  # noqa: E402
from webapp.jobs.models import Allocation  # noqa: E402
from webapp.jobs.services import job_create, job_stop, job_submit  # noqa: E402


def contend(seed: int, rounds: int) -> None:
    """Ask for gangs of any shape, say what came of each, and let go again."""
    dice = random.Random(seed)  # noqa: S311 -- it only has to be repeatable
    team, owner, pool = Team.objects.get(), User.objects.get(), Pool.objects.get()
    for _ in range(rounds):
        num_wanted = dice.randint(1, 16)
        job = job_create(
            team=team,
            owner=owner,
            pool=pool,
            spec=TrainSpec(),
            name=f"gang of {seed}",
            model_name="demo",
            devices_per_host=num_wanted,
        )
        job = job_submit(job=job, by="alice")
        held = Allocation.objects.filter(attempt__job=job, released_at=None).count()
        sys.stdout.write(f"gang {job.pk} wanted {num_wanted} held {held}\n")
        sys.stdout.flush()
        job_stop(job=job, by="alice")
    connection.close()


if __name__ == "__main__":
    contend(int(sys.argv[1]), int(sys.argv[2]))
