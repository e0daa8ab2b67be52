"""Benchmark of live events: from a host's message to a browser."""

import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import redis
from django.contrib.auth.models import User
from django.core.management.base import CommandError
from django.test import Client

from runners.host import redis_access
from webapp.accounts.models import Membership, Team
from webapp.bench import site
from webapp.bench.host_load import facts_of
from webapp.bench.live_ends import EVENTS, FENCE, SHOWN, Attempts, send, watch
from webapp.core.clock import now
from webapp.hosts.models import Host, HostState, Pool
from webapp.jobs.models import Attempt, Job, JobState
from webapp.live.stream import ticket_for

if TYPE_CHECKING:
    from multiprocessing.queues import Queue


JOBS = 200
JOBS_PER_VIEWER = 8
SETTLE_SECONDS = 12.0  # the control process detects new hosts after five seconds
MEASURED_SECONDS = 30.0
PARTS = ("control", "webapp.asgi", "redis")

Row = tuple[str, float, str, str]


def live_path_metrics(data: Path) -> Iterator[Row]:
    """Yield backlog, CPU time and latency for many jobs that report once a second."""
    with site.running(data) as up:
        yield from load_rows(up, JOBS, SETTLE_SECONDS, MEASURED_SECONDS)


def load_rows(up: site.Site, jobs: int, settle: float, seconds: float) -> Iterator[Row]:
    """Let jobs report on a running site; measure for ``seconds`` after ``settle`` seconds."""
    data = up.call(f"fill({jobs}, {JOBS_PER_VIEWER})")
    attempts: Attempts = data["attempts"]
    url, context = up.redis_url, multiprocessing.get_context("spawn")
    seen: Queue[list[tuple[int, int]]] = context.Queue()
    done: Queue[int] = context.Queue()
    begins_at = time.time() + settle
    ends_at = begins_at + seconds
    others = [
        context.Process(target=watch, args=(up.url, data["tickets"], ends_at + 2.0, seen)),
        context.Process(target=send, args=(url, attempts, (begins_at, ends_at), done)),
    ]
    with site.in_background(*others):
        time.sleep(settle)
        parts = {name: up.part(name) for name in PARTS}
        before = {name: _cpu_seconds(part) for name, part in parts.items()}
        backlog = _backlog(url, attempts, ends_at)
        used = {name: _cpu_seconds(part) - before[name] for name, part in parts.items()}
        num_sent, arrivals = done.get(timeout=60), seen.get(timeout=60)
    waits = sorted(at - sent for sent, at in arrivals if sent >= begins_at * 1000)
    yield from _backlog_rows(f"{jobs} jobs x 1 Hz", backlog, seconds)
    yield "batches sent, of those offered", num_sent / (jobs * seconds), "ratio", "1"
    yield from _rows_of_sent(num_sent, backlog, used, waits, seconds)


def _rows_of_sent(
    num_sent: int, backlog: list[int], used: dict[str, float], waits: list[int], seconds: float
) -> Iterator[Row]:
    """Yield costs and latencies of the batches that were sent, and handled, in a time.

    A busy machine sends fewer than were to be sent, and handles fewer than it sends.

    Raises:
        CommandError: none was handled or seen.
    """
    num_handled = num_sent - (backlog[-1] - backlog[0])
    if num_handled <= 0 or not waits:
        raise CommandError(
            f"of {num_sent} batches that were sent within {seconds:g} s none was handled and "
            "seen: repeat this on a machine that is not busy"
        )
    yield from _cost_rows(used, num_handled * EVENTS, seconds)
    yield "events with an instant that browsers saw", len(waits) / (num_sent * SHOWN), "ratio", "1"
    yield "host to browser, median", statistics.median(waits) / 1000, "s", ""
    yield "host to browser, p99", waits[int(len(waits) * 0.99)] / 1000, "s", "at most 0.5"
    yield "host to browser, slowest", waits[-1] / 1000, "s", ""


def _backlog_rows(what: str, backlog: list[int], seconds: float) -> Iterator[Row]:
    quarter = max(len(backlog) // 4, 1)
    grown = statistics.mean(backlog[-quarter:]) - statistics.mean(backlog[:quarter])
    yield f"{what}: batches waiting, median", statistics.median(backlog), "", ""
    yield f"{what}: batches waiting, most", max(backlog), "", ""
    yield f"{what}: growth of what waits", grown / (seconds * 3 / 4), "1/s", "none"


def _cost_rows(used: dict[str, float], num_events: float, seconds: float) -> Iterator[Row]:
    yield "control process, an event", used["control"] / num_events, "s", ""
    for name, spent in used.items():
        yield f"{name} process", spent / seconds, "cores", ""


def _backlog(url: str, attempts: Attempts, ends_at: float) -> list[int]:
    """Return the number of waiting batches in all hosts' streams, sampled twice a second."""
    client = redis.Redis.from_url(url)
    samples = []
    while time.time() < ends_at:
        pipeline = client.pipeline(transaction=False)
        for host_id, _ in attempts:
            pipeline.xlen(redis_access.events_key(host_id))
        samples.append(sum(pipeline.execute()))
        time.sleep(0.5)
    client.close()
    return samples


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# ---------------------------------------------------------------------------
# Test data of the live path benchmark in a running site: hosts, jobs, users, sessions.
#
# ``Site.call`` runs each function in a process of the site; it prints one JSON document.
# ---------------------------------------------------------------------------


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
