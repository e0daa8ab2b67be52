"""A one-time token becomes a host, once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import connections

from runners.messages import EnrollRequest
from tests.webapp.conftest import enrol, make_facts
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem, InvalidProblem, UnauthorizedProblem
from webapp.hosts.models import EnrolmentToken, Host, HostState
from webapp.hosts.services import (
    command_key,
    credential_revoke,
    host_by_credential,
    host_enroll,
    host_set_state,
    token_create,
    token_revoke,
)
from webapp.jobs.models import Event

pytestmark = pytest.mark.django_db


def request_for(token: str, **changes) -> EnrollRequest:
    fields = {"token": token, "facts": make_facts(), "sent_at_ms": 0}
    return EnrollRequest(**{**fields, **changes})


@pytest.fixture
def token(team) -> str:
    return token_create(team=team, by=None, name="Box", pool="fast", labels={"rack": "3"})[1]


def test_a_new_host_takes_name_pool_and_labels_of_its_token(token):
    host = Host.objects.get(pk=host_enroll(request_for(token)).host_id)
    assert (host.name, host.pool.slug, host.labels) == ("Box", "fast", {"rack": "3"})


def test_a_new_host_is_checked_before_it_is_ready(token):
    host = Host.objects.get(pk=host_enroll(request_for(token)).host_id)
    assert host.state == "checking"


def test_a_host_may_name_itself(token):
    assert host_enroll(request_for(token, name="Own name")).name == "Own name"


def test_two_hosts_of_one_name_get_two_slugs(team):
    hosts = [enrol(team, name="Box")[0] for _ in range(3)]
    assert [host.slug for host in hosts] == ["box", "box-2", "box-3"]


def test_a_name_without_letters_still_gets_a_slug(team):
    assert enrol(team, name="箱")[0].slug == "host"


def test_a_used_token_is_refused(token):
    host_enroll(request_for(token))
    with pytest.raises(UnauthorizedProblem, match="used"):
        host_enroll(request_for(token))


def test_an_unknown_token_is_refused(team):
    with pytest.raises(UnauthorizedProblem):
        host_enroll(request_for("guess"))


def test_a_revoked_token_is_refused(token):
    token_revoke(token=EnrolmentToken.objects.get())
    with pytest.raises(UnauthorizedProblem):
        host_enroll(request_for(token))


def test_an_expired_token_is_refused(token):
    EnrolmentToken.objects.update(expires_at=now() - timedelta(seconds=1))
    with pytest.raises(UnauthorizedProblem):
        host_enroll(request_for(token))


def test_another_protocol_version_is_refused_and_keeps_the_token(token):
    with pytest.raises(InvalidProblem, match="protocol 99"):
        host_enroll(request_for(token, protocol_version=99))
    assert EnrolmentToken.objects.get().used_at is None


@pytest.mark.django_db(transaction=True)
def test_of_a_hundred_hosts_racing_with_one_token_one_enrols(token):
    start = threading.Barrier(100)

    def race(number: int) -> bool:
        start.wait()
        try:
            host_enroll(request_for(token, name=f"Box {number}"))
        except UnauthorizedProblem:
            return False
        finally:
            connections.close_all()
        return True

    with ThreadPoolExecutor(100) as pool:
        won = list(pool.map(race, range(100)))
    assert won.count(True) == 1
    assert Host.objects.count() == 1


def test_enrolling_again_rotates_the_credential(team, enrolled):
    host, old = enrolled
    _, text = token_create(team=team, by=None, name="Box")
    reply = host_enroll(request_for(text, host_id=host.pk))
    assert reply.host_id == host.pk
    assert host_by_credential(old) is None
    assert host_by_credential(reply.credential) == host


def test_another_teams_host_cannot_be_taken_over(other_team, enrolled):
    host, credential = enrolled
    _, text = token_create(team=other_team, by=None, name="Thief")
    assert host_enroll(request_for(text, host_id=host.pk)).host_id != host.pk
    assert host_by_credential(credential) == host


def test_the_doorbell_key_is_not_in_the_database(enrolled):
    host, _ = enrolled
    assert command_key(host) not in str(Host.objects.values().get())


def test_rotation_changes_the_doorbell_key(team, enrolled):
    host, _ = enrolled
    before = command_key(host)
    _, text = token_create(team=team, by=None, name="Box")
    assert host_enroll(request_for(text, host_id=host.pk)).command_key != before


def test_a_revoked_host_is_locked_out(enrolled):
    host, credential = enrolled
    credential_revoke(host=host, by="olga")
    assert host_by_credential(credential) is None


def test_nobody_is_the_empty_credential(enrolled):
    credential_revoke(host=enrolled[0], by="olga")
    assert host_by_credential("") is None


@pytest.mark.parametrize(("is_same", "expected"), [(True, "unix"), (False, None)])
def test_only_a_host_on_this_machine_is_told_of_a_socket(token, is_same, expected, settings):
    settings.REDIS_URL = "unix:///run/redis.sock"
    reply = host_enroll(request_for(token), is_same_machine=is_same)
    assert (reply.redis_url or "").split(":")[0] == (expected or "")


def test_a_host_on_another_machine_is_told_of_an_encrypted_redis_and_who_vouches_for_it(
    token, settings, tmp_path
):
    settings.HOST_REDIS_URL = "rediss://site:secret@redis.example.org:6380/0"
    settings.REDIS_CA = str(tmp_path / "ca.pem")
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----")

    reply = host_enroll(request_for(token))

    assert reply.redis_url == "rediss://redis.example.org:6380/0"
    assert reply.redis_ca_pem == "-----BEGIN CERTIFICATE-----"
    assert len(reply.redis_secret) >= 40


def test_a_host_is_never_told_the_sites_own_redis_user(token, settings):
    settings.REDIS_URL = "unix://slipway:secret@/run/redis.sock"
    reply = host_enroll(request_for(token), is_same_machine=True)
    assert reply.redis_url == "unix:///run/redis.sock"


def test_without_an_encrypted_redis_no_secret_of_it_leaves(token):
    reply = host_enroll(request_for(token))
    assert (reply.redis_url, reply.redis_secret, reply.redis_ca_pem) == (None, None, None)


@pytest.mark.parametrize(("state", "words"), [("checking", "measured"), ("retired", "enrol")])
def test_a_host_is_not_declared_ready_by_hand(enrolled, state, words):
    host, _ = enrolled
    Host.objects.update(state=state)
    with pytest.raises(ConflictProblem, match=words):
        host_set_state(host=host, to=HostState.READY, by="olga")


def test_a_drained_host_takes_jobs_again(host):
    for state in (HostState.DRAINING, HostState.READY):
        host_set_state(host=host, to=state, by="olga")
    assert host.state == "ready"


def test_enrolment_and_states_are_recorded(enrolled):
    host, _ = enrolled
    host_set_state(host=host, to="maintenance", by="olga")
    events = Event.objects.filter(subject=host.pk).values_list("kind", "to_state", "actor")
    assert list(events) == [
        ("host.enrolled", "checking", "host:box"),
        ("host.state", "maintenance", "olga"),
    ]


def test_no_token_can_be_taken_for_an_option(team):
    texts = [token_create(team=team, by=None, name="Box")[1] for _ in range(40)]

    assert all(text.startswith("slt_") for text in texts)
