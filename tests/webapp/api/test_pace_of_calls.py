"""Whoever calls too often is told the limit and the wait; nobody else notices."""

import pytest

from runners.messages import EnrollRequest
from tests.webapp.api.conftest import HostClient
from tests.webapp.api.test_beat_door import bearer, knock, said
from tests.webapp.conftest import client_of, enrol, make_beat, make_facts
from webapp.core import pace
from webapp.hosts.services import digest

pytestmark = pytest.mark.django_db(databases="__all__")
SLOW = {"per_second": 0.01, "burst": 3}


@pytest.fixture
def narrow(monkeypatch):
    """Make a limit so narrow that a test reaches it."""

    def make(module: str, name: str) -> None:
        limit = getattr(pace, name)._replace(**SLOW)
        monkeypatch.setattr(f"webapp.api.{module}.{name}", limit)

    return make


def statuses(call, times: int) -> list[int]:
    return [call().status_code for _ in range(times)]


def test_a_person_is_told_the_limit_and_when_to_come_back(alice, narrow):
    narrow("auth", "PERSON")
    client = client_of(alice)
    assert statuses(lambda: client.get("/api/v1/tickets?topics=jobs"), 3) == [200] * 3
    refused = client.get("/api/v1/tickets?topics=jobs")
    assert (refused.status_code, refused.json()["code"]) == (429, "too_many_calls")
    assert refused.headers["Retry-After"] in {"99", "100"}  # a second may pass meanwhile
    assert "One person may call 0.01 times a second" in refused.json()["detail"]


def test_another_person_of_the_same_team_goes_on(alice, bob, narrow):
    narrow("auth", "PERSON")
    client = client_of(alice)
    assert 429 in statuses(lambda: client.get("/api/v1/tickets?topics=jobs"), 5)
    assert client_of(bob).get("/api/v1/tickets?topics=jobs").status_code == 200


def test_one_host_that_went_wild_leaves_the_others_alone(enrolled, team, narrow):
    narrow("auth", "HOST")
    _, other = enrol(team, name="Other")
    wild, calm = HostClient(enrolled[1]), HostClient(other)
    got = statuses(lambda: wild.post("/hosts/echo?num_bytes=1", ""), 5)
    assert got == [200, 200, 200, 429, 429]
    assert calm.post("/hosts/beat", make_beat()).status_code == 200


def test_credentials_that_no_host_has_are_counted_by_address(db, narrow):
    narrow("auth", "STRANGER")
    tries = [HostClient(f"guess-{n}").post("/hosts/echo", "").status_code for n in range(5)]
    assert tries == [401, 401, 401, 429, 429]


def test_guesses_of_credentials_do_not_shut_out_a_host_of_that_address(as_host, narrow):
    narrow("auth", "STRANGER")
    statuses(lambda: HostClient("guess").post("/hosts/echo", ""), 5)
    assert as_host.post("/hosts/echo?num_bytes=1", "").status_code == 200


def test_tokens_are_not_tried_without_end(as_nobody, narrow):
    narrow("hosts", "STRANGER")
    request = EnrollRequest(token="x" * 43, facts=make_facts(), sent_at_ms=1)
    tries = statuses(lambda: as_nobody.post("/hosts/enroll", request), 5)
    assert tries == [401, 401, 401, 429, 429]


def test_beats_have_a_limit_of_their_own(credential, narrow):
    narrow("heartbeat_endpoint", "BEAT")
    door = [knock(said(), bearer(credential)) for _ in range(4)]
    assert [answer.status for answer in door] == [200, 200, 200, 429]
    assert door[-1].headers[b"retry-after"] == b"100"
    assert digest(credential) not in str(door[-1].body)
