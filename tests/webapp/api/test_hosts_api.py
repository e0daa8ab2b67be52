"""The host's doors over HTTP: enrol, beat."""

import pytest

from runners.messages import BeatReply, EnrollReply, EnrollRequest, RotateReply, RotateRequest
from tests.webapp.api.conftest import HostClient
from tests.webapp.conftest import enrol, make_beat, make_facts
from webapp.api import hosts
from webapp.core.problems import ConflictProblem
from webapp.hosts.models import Host
from webapp.hosts.services import (
    command_key,
    credential_revoke,
    digest,
    rotation_request,
    token_create,
)

pytestmark = pytest.mark.django_db(databases="__all__")


def enroll_request(team, **facts) -> EnrollRequest:
    _, text = token_create(team=team, by=None, name="Box")
    return EnrollRequest(token=text, facts=make_facts(**facts), sent_at_ms=0)


def test_a_token_gives_a_credential_that_works(as_nobody, team):
    reply = EnrollReply.model_validate(
        as_nobody.post("/hosts/enroll", enroll_request(team)).json()
    )
    answer = HostClient(reply.credential).post("/hosts/beat", make_beat())
    assert BeatReply.model_validate(answer.json()).run_microbench


def test_a_bad_token_is_a_problem_with_a_way_out(as_nobody, team):
    request = enroll_request(team).model_copy(update={"token": "guess"})
    answer = as_nobody.post("/hosts/enroll", request)
    assert (answer.status_code, answer.headers["Content-Type"]) == (
        401,
        "application/problem+json",
    )
    assert "Add a host" in answer.json()["detail"]


def test_a_beat_without_a_credential_is_refused(as_nobody):
    answer = as_nobody.post("/hosts/beat", make_beat())
    assert (answer.status_code, answer.json()["code"]) == (401, "not_authenticated")


def test_a_beat_with_a_revoked_credential_is_refused(as_host, enrolled):
    credential_revoke(host=enrolled[0], by="olga")
    answer = as_host.post("/hosts/beat", make_beat())
    assert (answer.status_code, answer.json()["code"]) == (401, "unknown_credential")


def test_a_session_is_no_credential(client, alice):
    client.force_login(alice)
    body = make_beat().model_dump_json()
    assert (
        client.post("/api/v1/hosts/beat", body, content_type="application/json").status_code == 401
    )


@pytest.mark.parametrize("body", ["{", "[]", '{"boot_id": 1}', '{"unknown": 1}'])
def test_a_malformed_beat_names_what_is_wrong(as_host, body):
    answer = as_host.post("/hosts/beat", body)
    assert answer.status_code in {400, 422}
    assert answer.json()["detail"]


def test_a_wrong_field_is_named(as_host):
    body = make_beat().model_dump_json().replace('"boot_id":"boot-1"', '"boot_id":7')
    answer = as_host.post("/hosts/beat", body)
    assert (answer.status_code, "boot_id" in answer.json()["detail"]) == (422, True)


def test_the_beat_is_stored(as_host, enrolled):
    as_host.post("/hosts/beat", make_beat(problems=("disk",)))
    assert Host.objects.get().last_beat["problems"] == ["disk"]


@pytest.fixture
def boot_file(monkeypatch, tmp_path):
    """This machine's boot id is "same"."""
    path = tmp_path / "boot_id"
    path.write_text("same\n")
    monkeypatch.setattr(hosts, "BOOT_ID", path)


@pytest.mark.parametrize(
    ("address", "boot_id", "is_told"),
    [("127.0.0.1", "same", True), ("127.0.0.1", "other", False), ("10.0.0.7", "same", False)],
)
def test_only_this_machine_is_told_of_its_redis(
    team, client, boot_file, address, boot_id, is_told
):
    body = enroll_request(team, boot_id=boot_id).model_dump_json()
    answer = client.post(
        "/api/v1/hosts/enroll", body, content_type="application/json", REMOTE_ADDR=address
    )
    assert bool(answer.json()["redis_url"]) == is_told


def test_a_host_replaces_its_secrets_and_the_old_ones_end(as_host, enrolled):
    host, _ = enrolled
    request = RotateRequest(credential_hash=digest("fresh"), redis_secret_hash=digest("redis"))

    reply = RotateReply.model_validate(as_host.post("/hosts/rotate", request).json())

    host.refresh_from_db()
    assert reply.command_key == command_key(host)
    assert HostClient("fresh").post("/hosts/beat", make_beat()).status_code == 200
    assert as_host.post("/hosts/beat", make_beat()).status_code == 401


def test_no_host_takes_anothers_secret(as_host, enrolled, team):
    other, _ = enrol(team, name="Other")
    request = RotateRequest(
        credential_hash=other.credential_hash, redis_secret_hash=digest("redis")
    )

    answer = as_host.post("/hosts/rotate", request)

    assert (answer.status_code, answer.json()["code"]) == (409, "secret_taken")


@pytest.mark.parametrize("num_bytes", [0, 1, 2 * 1024**2])
def test_a_host_measures_its_way_by_bytes_there_and_back(as_host, num_bytes):
    answer = as_host.post(f"/hosts/echo?num_bytes={num_bytes}", "x" * num_bytes)

    assert (answer.status_code, len(answer.content)) == (200, num_bytes)


@pytest.mark.parametrize(("asked", "sent"), [(-1, 0), (2 * 1024**2 + 1, 0), (0, 2 * 1024**2 + 1)])
def test_no_more_than_two_mebibytes_go_either_way(as_host, asked, sent):
    answer = as_host.post(f"/hosts/echo?num_bytes={asked}", "x" * sent)

    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")


def test_an_operator_asks_once_and_the_beat_tells(as_host, enrolled):
    host, _ = enrolled
    rotation_request(host=host, by="olga")
    assert as_host.post("/hosts/beat", make_beat()).json()["rotate"]

    request = RotateRequest(credential_hash=digest("fresh"), redis_secret_hash=digest("redis"))
    as_host.post("/hosts/rotate", request)

    assert not HostClient("fresh").post("/hosts/beat", make_beat()).json()["rotate"]


def test_a_host_that_is_locked_out_cannot_be_asked(enrolled):
    credential_revoke(host=enrolled[0], by="olga")
    with pytest.raises(ConflictProblem, match="enrol it again"):
        rotation_request(host=enrolled[0], by="olga")
