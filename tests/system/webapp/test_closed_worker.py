"""The real Celery worker, shipper, dispatcher and consumer, each under its own Redis user.

Redis keeps a log of what it denied: through doorbells, crashes and stops it stays empty.
"""

import os
import signal
import time

import pytest

from runners.host.doorbell import DoorbellWorkerSupervisor
from runners.host.shipping import RedisStream
from runners.host.wake import WakeListener
from runners.shared.config import Credential, HostDir
from runners.shared.messages import Doorbell, EnrollRequest, EventBatch, RunEvent
from tests.plugins.extent import first
from tests.runners.tools import wait_for
from tests.webapp.conftest import make_beat, make_facts
from tests.webapp.hosts.conftest import programs
from tests.webapp.hosts.test_beats import queue_of
from webapp.agents import dispatch
from webapp.agents.consume import StreamConsumer
from webapp.agents.heartbeats import host_beat
from webapp.agents.round_trips import RoundTrips
from webapp.core import outages
from webapp.hosts import epoch
from webapp.hosts.models import Host
from webapp.hosts.services import host_enroll, token_create

# The suite runs one of the servers here; test_redis_users holds what each of them lets users do.
SERVER = pytest.mark.parametrize("closed_redis", first(programs()), indirect=True)
pytestmark = [pytest.mark.django_db, pytest.mark.faults, SERVER]
RING = Doorbell(command_id="c1", kind="ping")


@pytest.fixture
def host_dir(closed_redis, team, tmp_path) -> HostDir:
    """A host that enrolled itself, as its folder."""
    made = HostDir(tmp_path / "host")
    made.make()
    _, text = token_create(team=team, by=None, name="Box")
    sent_at_ms = int(time.time() * 1000)
    request = EnrollRequest(token=text, facts=make_facts(), sent_at_ms=sent_at_ms)
    reply = host_enroll(request, is_same_machine=True)
    fields = reply.model_dump(exclude={"server_time_ms", "redis_ca_pem"})
    made.save_credential(Credential(server="http://127.0.0.1:9", **fields))
    return made


@pytest.fixture
def host(host_dir) -> Host:
    assert epoch.provision()
    return Host.objects.get()


@pytest.fixture
def worker(host_dir, host):
    child = DoorbellWorkerSupervisor(host_dir)
    child.keep_running()
    wait_for(host_dir.pings.exists, 60)
    yield child
    child.stop()


@pytest.fixture
def listener(host_dir):
    made = WakeListener(host_dir.wake)
    yield made
    made.close()


def wakes_agent(worker: DoorbellWorkerSupervisor, host: Host, listener: WakeListener) -> bool:
    worker.keep_running()
    dispatch.ring(host, RING)
    return listener.wait(2)


def test_a_worker_outlives_kills_of_it_and_of_redis_under_its_own_user_without_one_denial(
    closed_redis, host, worker, listener
):
    wait_for(lambda: wakes_agent(worker, host, listener), 60)
    closed_redis.end(signal.SIGKILL)
    closed_redis.start()
    epoch.load_scripts()  # as the ticker does, every few seconds
    wait_for(lambda: wakes_agent(worker, host, listener), 60)
    assert set(closed_redis.denials()) <= {("command", "script|load")}  # tried before that
    closed_redis.admin.acl_log_reset()

    os.killpg(worker.pid, signal.SIGKILL)
    wait_for(lambda: wakes_agent(worker, host, listener), 60)
    worker.stop()

    assert closed_redis.denials() == []


def test_events_and_acknowledgements_pass_under_their_own_users(closed_redis, host_dir, host):
    credential = host_dir.credential()
    stream = RedisStream(credential.shipper_url, credential.host_id)
    consumer = StreamConsumer(outages.connection(outages.CONSUMER))
    event = RunEvent(seq=1, t_ms=1, kind="phase", body={"name": "x"})

    assert stream.add(EventBatch(attempt_id="unknown", fence="f", events=(event,)))
    assert consumer.step() == 1
    assert stream.acked("unknown") == 0
    stream.close()

    assert closed_redis.denials() == []


def test_a_denial_would_be_seen(closed_redis, host_dir, host):
    client = closed_redis.user(*_worker_of(host_dir.credential()))
    with pytest.raises(Exception, match="NOPERM|permission"):  # noqa: RUF043 - by server
        client.flushall()

    assert closed_redis.denials() == [("command", "flushall")]


def _worker_of(credential: Credential) -> tuple[str, str]:
    return f"h_{credential.host_id}", credential.redis_secret or ""


def test_the_real_worker_answers_under_its_own_user_without_a_denial(closed_redis, host_dir, host):
    child = DoorbellWorkerSupervisor(host_dir)
    child.keep_running()
    wait_for(host_dir.pings.exists, 60)
    host_beat(host=host, beat=make_beat(facts=make_facts()))
    trips = RoundTrips(outages.connection(outages.CONSUMER), dispatch.ring)

    wait_for(trips.step, 60)
    child.stop()

    assert queue_of(host)["seconds"] < 3
    assert closed_redis.denials() == []
