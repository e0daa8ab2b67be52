"""A hundred machines knock at one moment with one token, over real HTTP: one becomes a host."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from django.core.servers.basehttp import WSGIServer
from pytest_django.live_server_helper import LiveServer

from runners.host.enrolment import enroll
from runners.shared.config import HostDir
from runners.shared.messages import EnrollRequest
from tests.webapp.conftest import make_facts
from webapp.core import pace
from webapp.hosts.models import EnrolmentToken, Host
from webapp.hosts.services import token_create

NUM_MACHINES = 100


@pytest.fixture
def live_server(monkeypatch):
    """A server that lets as many callers wait as the product's does: Django's own lets ten."""
    monkeypatch.setattr(WSGIServer, "request_queue_size", 2048)
    server = LiveServer("localhost")
    yield server
    server.stop()


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_of_a_hundred_machines_with_one_token_one_becomes_a_host(live_server, team):
    _, text = token_create(team=team, by=None, name="Box")
    body = EnrollRequest(token=text, facts=make_facts(), sent_at_ms=0).model_dump_json()
    start = threading.Barrier(NUM_MACHINES)

    def knock(_: int) -> int:
        start.wait()
        url = f"{live_server.url}/api/v1/hosts/enroll"
        headers = {"Content-Type": "application/json"}
        return httpx.post(url, content=body, headers=headers, timeout=120).status_code

    with ThreadPoolExecutor(NUM_MACHINES) as pool:
        answers = Counter(pool.map(knock, range(NUM_MACHINES)))

    assert answers == {200: 1, 401: NUM_MACHINES - 1}
    assert Host.objects.count() == 1
    assert EnrolmentToken.objects.get().host == Host.objects.get()


@pytest.mark.django_db(transaction=True)
def test_machines_of_one_address_wait_for_their_turn_and_all_become_hosts(
    live_server, team, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "webapp.api.agents.STRANGER", pace.STRANGER._replace(per_second=2.0, burst=2)
    )
    tokens = [token_create(team=team, by=None, name=f"node-{n}")[1] for n in range(5)]
    folders = [HostDir(tmp_path / f"node-{n}") for n in range(5)]

    with ThreadPoolExecutor(5) as pool:
        calls = zip(folders, tokens, strict=True)
        names = pool.map(lambda call: enroll(call[0], live_server.url, call[1]).name, calls)

    assert sorted(names) == [f"node-{n}" for n in range(5)]
