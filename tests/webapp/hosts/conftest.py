"""A Redis as ``up`` runs it: closed to everybody whom it does not know by name."""

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from runners.shared.redis_address import bare, shipper_user, with_user, worker_user
from tests.webapp.conftest import claim, enrol, make_beat, make_job, make_microbench
from webapp.agents.heartbeats import host_beat
from webapp.boot import broker
from webapp.core import outages as web_broker
from webapp.jobs.models import Attempt
from webapp.jobs.services import job_submit


def programs() -> list:
    """Every real server of this machine."""
    installed = [shutil.which(name) for name in broker.SERVER_NAMES]
    found = [program for program in [*installed, broker.wheel()] if program]
    return [pytest.param(program, id=Path(program).name) for program in found]


class ClosedRedis:
    """A server with an ACL file, and clients of its users."""

    def __init__(self, program: str, folder: Path) -> None:
        self.chosen = broker._embedded(program, broker.version_of(program), folder)
        self.clients: list[redis.Redis] = []

    def start(self) -> None:
        self.process = subprocess.Popen(self.chosen.command, stdout=subprocess.DEVNULL)
        assert broker.wait_until_up(self.chosen.socket)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait()

    def client(self, url: str) -> redis.Redis:
        client = redis.Redis.from_url(url, decode_responses=True)
        self.clients.append(client)
        return client

    @property
    def admin(self) -> redis.Redis:
        return self.client(self.chosen.url)

    def user(self, name: str, secret: str) -> redis.Redis:
        return self.client(with_user(bare(self.chosen.url), name, secret))

    def worker(self, host_id: str, secret: str) -> redis.Redis:
        return self.user(worker_user(host_id), secret)

    def shipper(self, host_id: str, secret: str) -> redis.Redis:
        return self.user(shipper_user(host_id), secret)

    def denials(self) -> list:
        """What Redis refused, without what it was only not asked rightly."""
        return [(entry["reason"], entry["object"]) for entry in self.admin.acl_log()]


@pytest.fixture(params=programs())
def closed_redis(request, tmp_path_factory, settings) -> Iterator[ClosedRedis]:
    server = ClosedRedis(request.param, tmp_path_factory.mktemp("r"))
    server.start()
    settings.REDIS_URL = server.chosen.url
    web_broker._roles.clear()
    yield server
    web_broker._roles.clear()
    for client in server.clients:
        client.close()
    web_broker.client(server.chosen.url).close()
    server.end()


def another_attempt(team, owner, name: str) -> Attempt:
    """Return a claimed attempt on a new host."""
    host, _ = enrol(team, name=name)
    host_beat(host=host, beat=make_beat(microbench=make_microbench()))
    job = job_submit(job=make_job(team, owner, host), by="alice")
    claim(job.current_attempt)
    return Attempt.objects.get(pk=job.current_attempt_id)
