"""Processes that submit gangs and stop them again: all of them want the same devices.

``python -m tests.webapp.queue.contender PROCESSES ROUNDS`` prints a line for each gang. The
processes are forked from one that has imported the product and has no connection yet.
"""

import os
import random
import sys
import traceback

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
        # One write, on a line of its own: logs of other processes go to the same pipe.
        line = f"\ngang {job.pk} wanted {num_wanted} held {held}\n"
        os.write(sys.stdout.fileno(), line.encode())
        job_stop(job=job, by="alice")
    connection.close()


def fork(seed: int, rounds: int) -> int:
    """Let a process of its own contend; return its id."""
    if pid := os.fork():
        return pid
    try:
        contend(seed, rounds)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def main(num_processes: int, rounds: int) -> int:
    """Let all of them contend at the same time; return how many broke."""
    pids = [fork(seed, rounds) for seed in range(num_processes)]
    return sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
