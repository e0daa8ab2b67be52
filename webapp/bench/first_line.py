"""Benchmark of the time from *Launch* to the first log line of the demo on a running site."""

import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import httpx
from django.core.management.base import CommandError

from webapp.bench import site

TIMES = 2  # the second run is warm
LIMIT_SECONDS = 180.0
DEMO_SECONDS = "5"
CSRF_FIELD = re.compile(r'name="csrfmiddlewaretoken" value="([^"]+)"')
PLAN, JOB = re.compile(r"/plans/([0-9A-Za-z]+)/"), re.compile(r"/jobs/([0-9A-Za-z]+)/")
# Queries for the time of each milestone of a job, in chronological order.
MILESTONES = {
    "attempt made": "select created_at from jobs_attempt where job_id = ?",
    "claimed by its host": "select claimed_at from jobs_attempt where job_id = ?",
    "first line of its log": (
        "select e.received_at from jobs_attemptevent e join jobs_attempt a on a.id = e.attempt_id"
        " where a.job_id = ? and e.kind = 'log' order by e.seq limit 1"
    ),
    "first phase of its own": (
        "select e.received_at from jobs_attemptevent e join jobs_attempt a on a.id = e.attempt_id"
        " where a.job_id = ? and e.kind = 'phase' order by e.seq limit 1 offset 1"
    ),
}
ENDED = "select ended_at from jobs_job where id = ?"
GOAL = {"first line of its log": "at most 2"}
Row = tuple[str, float, str, str]


def first_line_metrics(data: Path) -> Iterator[Row]:
    """Yield the time of each milestone of the demo, in seconds after the click."""
    with site.running(data, SLIPWAY_DEMO_SECONDS=DEMO_SECONDS) as up:
        cookies = up.call("session()")["cookies"]
        with httpx.Client(base_url=up.url, cookies=cookies, timeout=60.0) as browser:
            deadline = time.monotonic() + LIMIT_SECONDS
            while "Ready" not in browser.get("/hosts/this-machine/", follow_redirects=True).text:
                if time.monotonic() > deadline:
                    raise CommandError("This machine did not become ready.")
                time.sleep(0.5)
            for number in range(TIMES):
                clicked, job = _launch(browser)
                for name, query in MILESTONES.items():
                    seconds = _milestone_time(up.data, query, job) - clicked
                    how = "warm" if number else "first"
                    yield (
                        f"demo, {how}: {name}",
                        seconds,
                        "s",
                        GOAL.get(name, "") if number else "",
                    )
                _milestone_time(up.data, ENDED, job)


def _launch(browser: httpx.Client) -> tuple[float, str]:
    """Launch the demo through its page; return the time (Unix seconds) and the job's id."""
    page = browser.get("/plans/new/?preset=demo", follow_redirects=True)
    plan, token = PLAN.search(str(page.url)), CSRF_FIELD.search(page.text)
    if plan is None or token is None:
        raise CommandError(f"The demo made no plan: {page.status_code} at {page.url}")
    fields = {"run": "job", "csrfmiddlewaretoken": token[1]}
    clicked = time.time()
    answer = browser.post(
        f"/plans/{plan[1]}/launch/", data=fields, headers={"Referer": str(browser.base_url)}
    )
    job = JOB.search(answer.headers.get("Location", ""))
    if job is None:
        raise CommandError(f"The demo was not launched: {answer.status_code}")
    return clicked, job[1]


def _milestone_time(data: Path, query: str, job: str) -> float:
    """Wait for a milestone of a job and return its time in Unix seconds."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        with closing(sqlite3.connect(data / "slipway.sqlite3", timeout=20)) as rows:
            row = rows.execute(query, [job]).fetchone()
        if row and row[0]:
            return datetime.fromisoformat(row[0]).replace(tzinfo=UTC).timestamp()
        time.sleep(0.1)
    raise CommandError(f"job {job} did not come so far: {query}")
