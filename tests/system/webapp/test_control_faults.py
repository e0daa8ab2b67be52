"""The control worker and its Redis are killed while events flow; each is stored once.

Everything is real: the process, the broker, the database file. The host's part is played by
a shipper that goes back to the last acknowledged number, as the contract says.
"""

import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import redis

from runners.host.redis_access import ack_key, encode, events_key
from runners.shared.messages import EventBatch, RunEvent
from tests.plugins.extent import first
from tests.stack import copy_migrated

pytestmark = [pytest.mark.faults, pytest.mark.slow]
TOTAL = 1500
ACTS = ["kill control", "kill redis", *first(["kill control"], 0), "empty redis", "kill both"]
BATCH = 25
STALL_SECONDS = 0.5
DEADLINE_SECONDS = 240
SET_UP = """
import json
from tests.webapp.conftest import claim, enrol, make_beat, make_job, make_microbench, _member
from webapp.accounts.models import Role, Team
from webapp.agents.heartbeats import host_beat
from webapp.jobs.services import job_submit
team = Team.objects.create(name="Team")
host, _ = enrol(team)
host_beat(host=host, beat=make_beat(microbench=make_microbench()))
job = job_submit(job=make_job(team, _member("alice", team, Role.PRACTITIONER), host), by="alice")
claim(job.current_attempt)
attempt = job.current_attempt
print(json.dumps({"host": host.pk, "attempt": attempt.pk, "fence": attempt.fence}))
"""


def event(seq: int) -> RunEvent:
    if seq % 3:
        body = {"source": "job", "values": {"loss": 1 / seq}}
        return RunEvent(seq=seq, t_ms=seq * 100, kind="metric", body=body)
    return RunEvent(
        seq=seq, t_ms=seq * 100, kind="log", body={"stream": "stdout", "text": str(seq)}
    )


class Shipper:
    """Goes back to the acknowledged number after any error and when nothing moves."""

    def __init__(self, url: str, ids: dict[str, str]) -> None:
        self.client = redis.Redis.from_url(url, socket_timeout=2)
        self.ids = ids
        self.acked = self.sent = 0
        self.moved_at = time.monotonic()

    def pump(self) -> None:
        try:
            self._learn(int(self.client.hget(ack_key(self.ids["host"]), self.ids["attempt"]) or 0))
            if self.sent - self.acked < 20 * BATCH and self.sent < TOTAL:
                self._send()
        except redis.RedisError:
            self.sent = self.acked
            time.sleep(0.05)

    def _learn(self, acked: int) -> None:
        if acked > self.acked:
            self.acked, self.moved_at = acked, time.monotonic()
        elif time.monotonic() - self.moved_at > STALL_SECONDS:
            self.sent, self.moved_at = self.acked, time.monotonic()

    def _send(self) -> None:
        numbers = range(self.sent + 1, min(self.sent + BATCH, TOTAL) + 1)
        events = tuple(event(number) for number in numbers)
        attempt, fence = self.ids["attempt"], self.ids["fence"]
        batch = EventBatch(attempt_id=attempt, fence=fence, events=events)
        self.client.xadd(events_key(self.ids["host"]), encode(batch))
        self.sent = numbers[-1]
        time.sleep(0.01)


class Installation:
    """A data folder with its own database, and a control worker that can be killed."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "SLIPWAY_DATA_DIR": str(folder),
            "REDIS_URL": redis_url,
            "DATABASE_URL": "",
        }
        self.worker: subprocess.Popen[bytes] | None = None

    def manage(self, *arguments: str) -> str:
        command = [sys.executable, "manage.py", *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, check=True)
        return done.stdout.decode()

    def start(self) -> None:
        command = [sys.executable, "manage.py", "control"]
        with (self.folder / "control.log").open("ab") as log:
            self.worker = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def kill(self) -> None:
        if self.worker is not None:
            self.worker.kill()
            self.worker.wait()

    def rows(self, database: str, query: str) -> list[tuple]:
        with closing(sqlite3.connect(self.folder / f"{database}.sqlite3")) as connection:
            return connection.execute(query).fetchall()


@pytest.fixture
def installation(redis_server, tmp_path):
    folder = tmp_path / "data"
    copy_migrated(folder)
    folder.mkdir(exist_ok=True)
    made = Installation(folder, redis_server.url)
    made.manage("prepare")
    yield made
    made.kill()


def storm(installation: Installation, redis_server, shipper: Shipper) -> list[str]:
    """Ship everything while parts die; return what was done to them."""
    chance = random.Random(7)  # noqa: S311 (a test, not a secret)
    acts = list(ACTS)
    done: list[str] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    next_at = TOTAL // 12
    installation.start()
    while shipper.acked < TOTAL and time.monotonic() < deadline:
        shipper.pump()
        if acts and shipper.acked >= next_at:
            done.append(strike(acts.pop(0), installation, redis_server, chance))
            next_at = shipper.acked + TOTAL // 10
    return done


def strike(act: str, installation: Installation, redis_server, chance: random.Random) -> str:
    if act in {"kill control", "kill both"}:
        installation.kill()
    if act in {"kill redis", "kill both"}:
        redis_server.kill()
        time.sleep(chance.uniform(0.1, 0.5))
        redis_server.start()
    if act == "empty redis":
        with redis.Redis.from_url(redis_server.url) as client:
            client.flushall()
    if act in {"kill control", "kill both"}:
        installation.start()
    return act


def test_each_event_is_stored_once_through_kills_of_control_and_redis(installation, redis_server):
    ids = json.loads(installation.manage("shell", "--no-imports", "-c", SET_UP))
    shipper = Shipper(redis_server.url, ids)
    done = storm(installation, redis_server, shipper)
    shipper.client.close()
    assert (shipper.acked, len(done)) == (TOTAL, len(ACTS))
    lines = [seq for (seq,) in installation.rows("slipway", "SELECT seq FROM jobs_attemptevent")]
    assert sorted(lines) == list(range(3, TOTAL + 1, 3))
    ((points,),) = installation.rows("metrics", "SELECT sum(n) FROM metrics_metricbatch")
    assert points == TOTAL - len(lines)
