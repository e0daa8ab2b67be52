"""One Redis user a host: on real servers with their real rules, nobody reaches another's keys."""

import re
import signal
import time
from typing import NamedTuple

import pytest
import redis

from runners.shared.messages import EnrollRequest, RotateRequest
from tests.runners.tools import wait_for
from tests.webapp.conftest import make_facts
from tests.webapp.hosts.conftest import programs
from webapp.core import outages
from webapp.hosts import epoch
from webapp.hosts.models import Host, HostState
from webapp.hosts.services import (
    credential_revoke,
    digest,
    host_enroll,
    host_rotate,
    host_set_state,
    token_create,
)
from webapp.operations.management.commands import doctor

pytestmark = pytest.mark.django_db


class Enrolled(NamedTuple):
    """A host, and the secret of its Redis users."""

    host: Host
    secret: str

    @property
    def id(self) -> str:
        return self.host.pk


def enrol(team, name: str) -> Enrolled:
    _, text = token_create(team=team, by=None, name=name)
    sent_at_ms = int(time.time() * 1000)
    request = EnrollRequest(token=text, facts=make_facts(), sent_at_ms=sent_at_ms)
    reply = host_enroll(request, is_same_machine=True)
    return Enrolled(Host.objects.get(pk=reply.host_id), reply.redis_secret)


@pytest.fixture
def ours(closed_redis, team) -> Enrolled:
    return enrol(team, "Ours")


@pytest.fixture
def theirs(closed_redis, other_team, ours) -> Enrolled:
    found = enrol(other_team, "Theirs")
    closed_redis.admin.lpush(f"host:{found.id}:jobs", "message")
    closed_redis.admin.set(f"host:{found.id}:name", "theirs")
    return found


def test_enrolling_makes_two_users_of_one_secret_which_serve_its_own_keys(closed_redis, ours):
    assert closed_redis.worker(ours.id, ours.secret).ping()
    assert closed_redis.shipper(ours.id, ours.secret).ping()
    assert ours.secret not in str(closed_redis.admin.acl_list())
    assert ours.secret not in str(Host.objects.values().get())
    worker, shipper = (
        make(ours.id, ours.secret) for make in (closed_redis.worker, closed_redis.shipper)
    )
    worker.lpush(f"host:{ours.id}:jobs", "message")
    shipper.xadd(f"host:{ours.id}:events", {"a": "1"})
    assert worker.brpop([f"host:{ours.id}:jobs"], timeout=1)[1] == "message"
    assert shipper.xlen(f"host:{ours.id}:events") == 1
    assert closed_redis.denials() == []


def test_a_worker_runs_the_scripts_of_its_libraries_and_a_restarted_redis_gets_them_back(
    closed_redis, ours
):
    client = closed_redis.worker(ours.id, ours.secret)
    for _ in range(2):
        lock = client.lock(f"host:{ours.id}:lock", timeout=5)
        assert lock.acquire(blocking=False)
        lock.release()
        closed_redis.admin.script_flush()
        epoch.load_scripts()
    assert closed_redis.denials() == []


# What a worker's user tries at another host's things ({0}), and at everybody's.
WORKER_TRIES = {
    "read a key": ["GET", "host:{0}:name"],
    "write a key": ["SET", "host:{0}:name", "ours"],
    "delete a key": ["DEL", "host:{0}:name"],
    "take a message": ["BRPOP", "host:{0}:jobs", "1"],
    "put a message": ["LPUSH", "host:{0}:jobs", "junk"],
    "count messages": ["LLEN", "host:{0}:jobs"],
    "read a hash": ["HGET", "host:{0}:ack", "a"],
    "write a hash": ["HSET", "host:{0}:ack", "a", "9"],
    "read in a script": ["EVAL", "return redis.call('get', 'host:{0}:name')", "0"],
    "write in a script": ["EVAL", "return redis.call('set', KEYS[1], 1)", "1", "host:{0}:name"],
    "run a script of its own": ["EVAL", "return 1", "0"],
    "load a script": ["SCRIPT", "LOAD", "return 1"],
    "write a stream": ["XADD", "host:{0}:events", "*", "a", "1"],
    "read a stream": ["XRANGE", "host:{0}:events", "-", "+"],
    "listen to its control": ["SUBSCRIBE", "host:{0}:/0.celery.pidbox"],
    "listen to all": ["PSUBSCRIBE", "*"],
    "command the others": ["PUBLISH", "host:{0}:/0.celery.pidbox", "shutdown"],
    "read what pages are told": ["XRANGE", "live", "-", "+"],
    "tell pages": ["XADD", "live", "*", "t", "x"],
    "list keys": ["KEYS", "*"],
    "walk keys": ["SCAN", "0"],
    "pick a key": ["RANDOMKEY"],
    "empty all": ["FLUSHALL"],
    "empty one": ["FLUSHDB"],
    "configure": ["CONFIG", "GET", "*"],
    "list clients": ["CLIENT", "LIST"],
    "hang others up": ["CLIENT", "KILL", "TYPE", "normal"],
    "watch everybody": ["MONITOR"],
    "list users": ["ACL", "LIST"],
    "become more": ["ACL", "SETUSER", "h_{0}", "on", "nopass", "~*", "+@all"],
    "stop it": ["SHUTDOWN", "NOSAVE"],
    "save it elsewhere": ["BGSAVE"],
    "copy it": ["REPLICAOF", "attacker", "6379"],
    "load code": ["MODULE", "LIST"],
}


def allowed(client: redis.Redis, tries: dict[str, list[str]], *names: str) -> set[str]:
    """Return the tries that Redis did not refuse for want of permission."""
    return {name for name, words in tries.items() if not is_denied(client, words, names)}


def is_denied(client: redis.Redis, words: list[str], names: tuple[str, ...]) -> bool:
    try:
        client.execute_command(*[word.format(*names) for word in words])
    except redis.ResponseError as error:
        return bool(re.search(r"NOPERM|permission|can't access at least one", str(error)))
    return False


def test_a_hosts_users_reach_nothing_of_anybody_else(closed_redis, ours, theirs):
    client = closed_redis.worker(ours.id, ours.secret)
    assert allowed(client, WORKER_TRIES, theirs.id) == set()
    assert closed_redis.admin.get(f"host:{theirs.id}:name") == "theirs"
    assert closed_redis.admin.llen(f"host:{theirs.id}:jobs") == 1
    client = closed_redis.shipper(ours.id, ours.secret)
    assert allowed(client, SHIPPER_TRIES, theirs.id, ours.id) == set()
    with pytest.raises(redis.AuthenticationError):
        closed_redis.worker(ours.id, theirs.secret).ping()


SHIPPER_TRIES = {
    "write another's stream": ["XADD", "host:{0}:events", "*", "a", "1"],
    "read another's acknowledgements": ["HGET", "host:{0}:ack", "a"],
    "forge an acknowledgement": ["HSET", "host:{1}:ack", "a", "9"],
    "read the stream back": ["XREAD", "STREAMS", "host:{1}:events", "0"],
    "empty the stream": ["XTRIM", "host:{1}:events", "MAXLEN", "0"],
    "take a doorbell": ["BRPOP", "host:{1}:jobs", "1"],
    "ring a doorbell": ["LPUSH", "host:{1}:jobs", "junk"],
    "run a script": ["EVAL", "return 1", "0"],
    "list keys": ["KEYS", "*"],
    "empty all": ["FLUSHALL"],
}


CONSUMER_TRIES = {
    "forge an event": ["XADD", "host:x:events", "*", "a", "1"],
    "ring": ["LPUSH", "host:x:jobs", "junk"],
    "empty all": ["FLUSHALL"],
    "read what pages are told": ["XRANGE", "live", "-", "+"],
    "make users": ["ACL", "SETUSER", "me", "on"],
}
DISPATCHER_TRIES = {
    "forge an event": ["XADD", "host:x:events", "*", "a", "1"],
    "take a message back": ["BRPOP", "host:x:jobs", "1"],
    "read a key": ["GET", "host:x:name"],
    "write elsewhere": ["LPUSH", "live", "junk"],
    "list users": ["ACL", "LIST"],
}


def test_the_control_workers_users_do_their_own_work_only(closed_redis):
    assert outages.url_for(outages.CONSUMER) == closed_redis.chosen.url  # as the site, before
    assert epoch.provision()
    assert allowed(outages.connection(outages.CONSUMER), CONSUMER_TRIES) == set()
    assert allowed(outages.connection(outages.DISPATCHER), DISPATCHER_TRIES) == set()


# Revocation and rotation


@pytest.mark.parametrize("end", ["revoke", "retire"])
def test_a_host_that_is_locked_out_loses_its_open_connection_at_once(closed_redis, ours, end):
    client = closed_redis.worker(ours.id, ours.secret)
    assert client.ping()
    if end == "revoke":
        credential_revoke(host=ours.host, by="olga")
    else:
        host_set_state(host=ours.host, to=HostState.RETIRED, by="olga")
    with pytest.raises(redis.AuthenticationError):
        client.ping()


def rotate(enrolled: Enrolled, secret: str) -> None:
    request = RotateRequest(
        credential_hash=digest(f"http-{secret}"), redis_secret_hash=digest(secret)
    )
    host_rotate(host=enrolled.host, request=request, is_same_machine=True)


def test_rotation_ends_the_old_secret_and_its_open_connections(closed_redis, ours):
    client = closed_redis.shipper(ours.id, ours.secret)
    assert client.ping()
    rotate(ours, "fresh")
    with pytest.raises(redis.AuthenticationError):
        client.ping()
    assert closed_redis.shipper(ours.id, "fresh").ping()


def test_users_outlive_a_restart_and_a_redis_that_lost_them_gets_them_back(closed_redis, ours):
    closed_redis.end()
    closed_redis.start()
    assert closed_redis.worker(ours.id, ours.secret).ping()
    closed_redis.admin.acl_deluser(f"h_{ours.id}", f"s_{ours.id}")
    epoch.sync()
    assert closed_redis.worker(ours.id, ours.secret).ping()
    epoch.sync()
    assert epoch.sync() == 0
    closed_redis.admin.acl_setuser("h_somebody", enabled=True, nopass=True)
    epoch.sync(rewrite=True)
    assert "h_somebody" in closed_redis.admin.acl_users()


@pytest.mark.faults
def test_what_was_queued_in_transactions_outlives_a_kill_with_the_default_user_closed(
    closed_redis, ours
):
    admin = closed_redis.admin
    with admin.pipeline(transaction=True) as pipe:
        pipe.hset("host:1:unacked", "tag", "message").zadd("host:1:index", {"tag": 1}).execute()
    admin.eval("return redis.call('set', KEYS[1], 'kept')", 1, "host:1:script")
    # A write may wait for the fsync of an earlier one.
    wait_for(lambda: admin.info("persistence")["aof_buffer_length"] == 0)
    closed_redis.end(signal.SIGKILL)
    closed_redis.start()
    admin = closed_redis.admin
    assert admin.hget("host:1:unacked", "tag") == "message"
    assert admin.zscore("host:1:index", "tag") == 1
    assert admin.get("host:1:script") == "kept"


# What befalls Redis, and what the database says, come together again


def test_a_host_locked_out_while_redis_was_away_is_out_when_it_is_back(closed_redis, ours):
    closed_redis.end()
    credential_revoke(host=ours.host, by="olga")
    closed_redis.start()
    assert closed_redis.worker(ours.id, ours.secret).ping()
    epoch.sync()
    with pytest.raises(redis.AuthenticationError):
        closed_redis.worker(ours.id, ours.secret).ping()


def test_secrets_replaced_while_redis_was_away_hold_when_it_is_back(closed_redis, ours):
    closed_redis.end()
    rotate(ours, "fresh")
    closed_redis.start()
    epoch.sync()
    assert closed_redis.worker(ours.id, "fresh").ping()


def test_a_redis_that_is_away_is_left_for_the_next_time(closed_redis, ours):
    closed_redis.end()
    away = epoch.keep()
    closed_redis.start()
    closed_redis.admin.acl_deluser(f"h_{ours.id}")
    assert away == 0
    assert epoch.keep() > 0


# A Redis whose users are somebody else's business


@pytest.fixture
def bounded(closed_redis, settings):
    """The site's address names a user that may do all but make users."""
    closed_redis.admin.acl_setuser(
        "plain", enabled=True, passwords=["+pw"], keys=["*"], channels=["*"],
        commands=["+@all", "-acl"],
    )  # fmt: skip
    settings.REDIS_URL = closed_redis.chosen.url.replace(
        closed_redis.chosen.url.split("@")[0], "unix://plain:pw"
    )
    return closed_redis


def test_without_the_right_to_make_users_hosts_and_roles_do_without_and_say_why(
    bounded, team, settings
):
    enrolled = enrol(team, "Ours")
    assert enrolled.secret is None
    assert "may not create users" in enrolled.host.checks["redis_refusal"]
    assert not epoch.provision()
    assert outages.url_for(outages.CONSUMER) == settings.REDIS_URL


def test_a_redis_that_is_away_costs_no_enrolment(closed_redis, team):
    closed_redis.end()
    enrolled = enrol(team, "Ours")
    closed_redis.start()
    epoch.sync()
    assert closed_redis.worker(enrolled.id, enrolled.secret).ping()


# What the doctor says of a Redis that others run


def found_by_doctor(closed_redis, monkeypatch) -> doctor.Finding:
    monkeypatch.setenv("REDIS_URL", closed_redis.chosen.url)
    return next(one for one in doctor.findings() if one.topic == "Redis")


def test_the_doctor_finds_a_closed_redis_well_and_says_how_an_open_one_is_closed(
    closed_redis, monkeypatch
):
    found = found_by_doctor(closed_redis, monkeypatch)
    assert found.is_well
    assert "closed to strangers" in found.words
    closed_redis.admin.acl_setuser("default", enabled=True, nopass=True)
    found = found_by_doctor(closed_redis, monkeypatch)
    assert not found.is_well
    assert "ACL SETUSER default off resetpass ~* &* +@all" in found.words


def test_every_server_of_this_machine_is_tried():
    assert programs()
