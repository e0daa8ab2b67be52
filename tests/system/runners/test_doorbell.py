"""Doorbells through a real Redis and a real Celery worker: they wake, and nothing else."""

import os
import signal
import subprocess
import sys
import time

import pytest
from celery import Celery

from runners.host import tasks
from runners.host.app import QUEUE, settings, sign
from runners.host.doorbell import DoorbellWorkerSupervisor
from runners.host.wake import WakeListener, wake_agent
from runners.shared.config import Credential, HostDir
from runners.shared.messages import Doorbell
from runners.shared.redis_address import celery_url, key_prefix
from runners.supervision import procfs
from tests.runners.tools import RedisServer, wait_for

AGENT = """
import sys, time
from pathlib import Path
from runners.shared.config import HostDir
from runners.host.doorbell import DoorbellWorkerSupervisor
DoorbellWorkerSupervisor(HostDir(Path(sys.argv[1]))).keep_running()
time.sleep(600)
"""  # an agent with nothing but its worker

RING = Doorbell(command_id="c1", kind="start", attempt_id="a1", fence="f")


@pytest.fixture
def enrolled(host_dir: HostDir, credential: Credential) -> Credential:
    host_dir.save_credential(credential)
    return credential


@pytest.fixture
def ringable(host_dir, enrolled, monkeypatch):
    """The task functions in this process, aimed at the test's host folder."""
    monkeypatch.setenv("SLIPWAY_HOST_DIR", str(host_dir.path))
    tasks._host.cache_clear()
    yield
    tasks._host.cache_clear()


@pytest.fixture
def listener(host_dir):
    made = WakeListener(host_dir.wake)
    yield made
    made.close()


def signed(**changes: object) -> tuple[str, str]:
    options = {"host_id": "h1", "key": "command-key", "now": time.time()} | changes
    return sign(RING, **options)


def test_a_genuine_doorbell_wakes_the_agent(ringable, listener):
    assert tasks.ring(*signed()) == RING
    assert listener.wait(0)


@pytest.mark.parametrize("changes", [{"key": "stolen"}, {"host_id": "h2"}, {"now": 1.0}])
def test_a_doorbell_that_is_not_genuine_wakes_nobody(ringable, listener, changes, caplog):
    assert tasks.ring(*signed(**changes)) is None
    assert not listener.wait(0)
    assert "a doorbell was refused" in caplog.text


def test_the_same_doorbell_wakes_once(ringable, listener):
    doorbell = signed()
    tasks.ring(*doorbell)

    assert tasks.ring(*doorbell) is None


def test_many_wakes_are_one(ringable, listener):
    for _ in range(5):
        tasks.ring(*signed())

    assert listener.wait(0)
    assert not listener.wait(0)


def test_an_agent_with_many_open_files_wakes_as_well(host_dir):
    several = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    listener = WakeListener(host_dir.wake)  # its descriptor lies beyond what select() can take
    try:
        assert wake_agent(host_dir.wake)
        assert listener.wait(0)
        assert not listener.wait(0.01)
    finally:
        listener.close()
        for each in several:
            os.close(each)


def test_a_doorbell_without_an_agent_is_done_all_the_same(ringable):
    assert tasks.ring(*signed()) == RING


def test_a_unix_socket_is_spelt_as_celery_wants_it():
    assert celery_url("unix:///run/r.sock?db=2") == "redis+socket:///run/r.sock?virtual_host=2"
    assert celery_url("rediss://h:1/0") == "rediss://h:1/0"


def test_an_encrypted_broker_is_always_verified(credential):
    changed = credential.model_copy(update={"redis_url": "rediss://broker:6380/0"})

    options = settings(changed, ca_file="/ca.pem")["broker_use_ssl"]

    assert options["ssl_cert_reqs"].name == "CERT_REQUIRED"
    assert options["ssl_ca_certs"] == "/ca.pem"


def test_the_settings_that_keep_a_worker_from_hanging_are_set(credential):
    values = settings(credential.model_copy(update={"redis_url": "redis://h:1/0"}))

    assert values["worker_enable_remote_control"]
    assert values["task_acks_late"]
    assert not values["task_reject_on_worker_lost"]
    assert values["accept_content"] == ["json"]
    assert values["broker_transport_options"]["global_keyprefix"] == "host:h1:"


class Publisher:
    """The server's end: a queue below the host's prefix."""

    def __init__(self, url: str) -> None:
        self.app = Celery("test", broker=celery_url(url))
        options = {"global_keyprefix": key_prefix("h1"), "socket_timeout": 2}
        self.connection = self.app.connection_for_write(transport_options=options)

    def ring(self, **changes: object) -> None:
        self.app.send_task(
            "runners.start", args=signed(**changes), queue=QUEUE, connection=self.connection
        )


@pytest.fixture
def publisher(redis_server: RedisServer):
    made = Publisher(redis_server.url)
    yield made
    made.connection.release()
    made.app.close()


@pytest.fixture
def worker(host_dir: HostDir, credential: Credential, redis_server: RedisServer, listener):
    host_dir.save_credential(credential.model_copy(update={"redis_url": redis_server.url}))
    child = DoorbellWorkerSupervisor(host_dir)
    child.keep_running()
    wait_for(host_dir.pings.exists, 40)
    yield child
    child.stop()


def forget_earlier(redis_server: RedisServer, listener: WakeListener) -> None:
    """Wait until every doorbell that was rung is done, and take what it woke."""
    with redis_server.client() as client:
        wait_for(lambda: not client.exists(f"host:h1:{QUEUE}", "host:h1:unacked"), 40)
    listener.wait(0)


@pytest.mark.faults
def test_doorbells_wake_the_agent_after_a_kill_of_the_worker_or_redis_and_a_damaged_message(
    worker, publisher, listener, redis_server, host_dir
):
    def rings() -> bool:
        worker.keep_running()
        publisher.ring()
        return listener.wait(1)

    publisher.ring()
    assert listener.wait(10)

    forget_earlier(redis_server, listener)
    host_dir.pings.unlink()
    first = worker.pid
    worker._child.send_signal(signal.SIGKILL)
    worker._child.wait()
    worker.keep_running()
    time.sleep(worker._not_before - time.monotonic())
    worker.keep_running()
    wait_for(host_dir.pings.exists, 40)
    publisher.ring()
    assert listener.wait(10)
    assert worker.pid != first

    forget_earlier(redis_server, listener)
    with redis_server.client() as client:
        client.lpush(f"host:h1:{QUEUE}", "junk")
    wait_for(rings, 40)

    redis_server.kill()
    while listener.wait(1):  # what the worker had taken before
        pass
    redis_server.start()
    wait_for(rings, 40)


@pytest.mark.faults
def test_no_process_of_a_worker_outlives_its_killed_agent(
    host_dir, credential, redis_server, listener
):
    host_dir.save_credential(credential.model_copy(update={"redis_url": redis_server.url}))
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(host_dir.path)])
    wait_for(host_dir.pings.exists, 40)
    theirs = procfs.descendants(agent.pid)

    agent.kill()
    agent.wait()

    assert len(theirs) >= 3
    wait_for(lambda: not any(procfs.is_running(one.pid, one.start_ticks) for one in theirs))


def test_a_worker_that_will_not_stay_up_is_started_ever_more_rarely(host_dir):
    child = DoorbellWorkerSupervisor(host_dir, (sys.executable, "-c", "raise SystemExit(1)"))
    rests = []
    for _ in range(3):
        child._not_before = 0.0
        child.keep_running()
        child._child.wait()
        child.keep_running()
        rests.append(child._not_before - time.monotonic())

    assert 0 < rests[0] < rests[1] < rests[2]


def test_a_worker_that_does_not_listen_is_killed_with_what_it_started(host_dir, monkeypatch):
    monkeypatch.setattr("runners.host.doorbell.DOORBELL_STOP_SECONDS", 0.3)
    code = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    )
    child = DoorbellWorkerSupervisor(host_dir, (sys.executable, "-c", code))
    child.keep_running()
    process = child._child
    time.sleep(0.3)

    child.stop()

    assert process.returncode is not None
    assert child.pid is None


def exit_code_of(code: str, host_dir: HostDir) -> int:
    """Run code in a worker's place and return how it ended."""
    environment = {**os.environ, "SLIPWAY_HOST_DIR": str(host_dir.path)}
    return subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode


def test_a_worker_that_lost_an_acknowledgement_ends_itself(host_dir, enrolled):
    code = (
        "import logging; from runners.host.tasks import LostAckHandler\n"
        "logging.getLogger().addHandler(LostAckHandler())\n"
        "logging.getLogger('kombu').error('fine'); print('still here')\n"
        "logging.getLogger('celery.worker').critical(\"Couldn't ack %r\", 5)\n"
    )

    assert exit_code_of(code, host_dir) == tasks.EXIT_STALLED


def test_a_worker_that_hears_no_more_pings_ends_itself(host_dir, enrolled):
    host_dir.pings.touch()
    code = (
        "import os, time; from pathlib import Path; from runners.host import tasks\n"
        "tasks.WATCH_SECONDS, tasks.WORKER_SILENCE_SECONDS = 0.05, 0.3\n"
        f"pings = Path({str(host_dir.pings)!r})\n"
        "soon = time.time() + 0.2; os.utime(pings, (soon, soon))\n"
        "tasks._watch(pings, os.getppid())\n"
    )

    assert exit_code_of(code, host_dir) == tasks.EXIT_STALLED


def test_a_worker_whose_agent_is_gone_ends_itself(host_dir, enrolled):
    host_dir.pings.touch()
    code = (
        "from pathlib import Path; from runners.host import tasks; "
        f"tasks._watch(Path({str(host_dir.pings)!r}), -1)"
    )

    assert exit_code_of(code, host_dir) == 0
