"""Test data of the live path benchmark in a running site: hosts, jobs, users, sessions.

``Site.call`` runs each function in a process of the site; it prints one JSON document.
"""

import json
import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django.contrib.auth.models import User
from django.test import Client

from webapp.accounts.models import Membership, Team
from webapp.core.benches.crowd import facts_of
from webapp.core.benches.live_path import FENCE
from webapp.core.clock import now
from webapp.hosts.models import Host, HostState, Pool
from webapp.jobs.models import Attempt, Job, JobState
from webapp.live.publish import ticket_for

TEAM = "Live bench"
JOB_BYTES = 36_000  # size of a job's documents, as for the demo


def fill(num_jobs: int, jobs_per_viewer: int) -> None:
    """Create hosts with one running job each, and one viewer per ``jobs_per_viewer`` jobs.

    Print ``attempts``, a list of (host id, attempt id), and ``tickets`` of the live stream.
    """
    team, _ = Team.objects.get_or_create(name=TEAM)
    pool, _ = Pool.objects.get_or_create(team=team, name="live", slug="live")
    first = Host.objects.filter(pool=pool).count()
    attempts = [_running_attempt(team, pool, first + number) for number in range(num_jobs)]
    jobs = [attempt.job_id for attempt in attempts]
    _print_json(
        attempts=[(attempt.host_id, attempt.pk) for attempt in attempts],
        tickets=[
            _ticket(team, start, jobs[start : start + jobs_per_viewer])
            for start in range(0, num_jobs, jobs_per_viewer)
        ],
    )


def _running_attempt(team: Team, pool: Pool, number: int) -> Attempt:
    host = Host.objects.create(
        team=team, pool=pool, name=f"live-{number}", slug=f"live-{number}",
        state=HostState.READY, credential_hash=f"{number:064}",
        last_seen_at=now() + timedelta(days=1), facts=facts_of(number).model_dump(mode="json"),
    )  # fmt: skip
    job = Job.objects.create(
        team=team, owner=_person(team, 0), name=f"live {number}", kind="train", spec={},
        pool=pool, host=host, state=JobState.RUNNING, queued_at=now(), started_at=now(),
        estimate={"text": "x" * JOB_BYTES},
    )  # fmt: skip
    attempt = Attempt.objects.create(
        job=job, number=1, host=host, fence=FENCE, claimed_at=now(), started_at=now()
    )
    Job.objects.filter(pk=job.pk).update(current_attempt=attempt)
    return attempt


def _person(team: Team, number: int) -> User:
    user, is_new = User.objects.get_or_create(username=f"live-{number}")
    if is_new:
        Membership.objects.create(user=user, team=team, role="practitioner")
    return user


def _ticket(team: Team, number: int, jobs: Iterable[str]) -> str:
    return ticket_for(_person(team, number), [f"job:{job}" for job in jobs])


def session() -> None:
    """Log in a user of the site's first team and print the cookies."""
    client = Client()
    client.force_login(_person(Team.objects.earliest("created_at"), 0))
    _print_json(cookies={name: morsel.value for name, morsel in client.cookies.items()})


def _print_json(**document: Any) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
