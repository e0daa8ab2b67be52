"""The API of hosts: enrolment, heartbeats, attempts and artefacts."""

import hashlib
import json
from typing import Any, NamedTuple

import pytest
from asgiref.sync import async_to_sync
from django.db import DatabaseError

from runners.shared.addresses import own_addresses
from runners.shared.messages import (
    BeatReply,
    ClaimReply,
    ClaimRequest,
    EnrollReply,
    EnrollRequest,
    RotateReply,
    RotateRequest,
)
from tests.webapp.api.conftest import HostClient
from tests.webapp.conftest import EXIT_OK, STARTED, batch_of, enrol, make_beat, make_facts
from webapp import asgi
from webapp.accounts.models import StoredReply
from webapp.agents import heartbeats
from webapp.agents.ingest import events_accept
from webapp.api import agents
from webapp.core.problems import ConflictProblem
from webapp.hosts.models import Host
from webapp.hosts.services import (
    command_key,
    credential_revoke,
    digest,
    rotation_request,
    token_create,
)
from webapp.jobs import artefacts
from webapp.jobs.models import Artefact, Job

# The host's doors over HTTP: enrol, beat.


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


def test_a_beat_is_stored_for_a_credential_that_is_neither_absent_nor_revoked(
    as_nobody, as_host, enrolled
):
    answer = as_nobody.post("/hosts/beat", make_beat())
    assert (answer.status_code, answer.json()["code"]) == (401, "not_authenticated")
    as_host.post("/hosts/beat", make_beat(problems=("disk",)))
    assert Host.objects.get().last_beat["problems"] == ["disk"]
    credential_revoke(host=enrolled[0], by="olga")
    answer = as_host.post("/hosts/beat", make_beat())
    assert (answer.status_code, answer.json()["code"]) == (401, "unknown_credential")


def test_a_session_is_no_credential(client, alice):
    client.force_login(alice)
    body = make_beat().model_dump_json()
    assert (
        client.post("/api/v1/hosts/beat", body, content_type="application/json").status_code == 401
    )


def test_a_malformed_beat_names_what_is_wrong(as_host):
    for body in ["{", "[]", '{"boot_id": 1}', '{"unknown": 1}']:
        answer = as_host.post("/hosts/beat", body)
        assert answer.status_code in {400, 422}, body
        assert answer.json()["detail"], body
    body = make_beat().model_dump_json().replace('"boot_id":"boot-1"', '"boot_id":7')
    answer = as_host.post("/hosts/beat", body)
    assert (answer.status_code, "boot_id" in answer.json()["detail"]) == (422, True)


@pytest.fixture
def boot_file(monkeypatch, tmp_path):
    """This machine's boot id is "same"."""
    path = tmp_path / "boot_id"
    path.write_text("same\n")
    monkeypatch.setattr(agents, "BOOT_ID", path)


def test_only_this_machine_is_told_of_its_redis(team, client, boot_file):
    own = own_addresses()  # as `up --host ADDRESS` enrols this machine
    for address, boot_id, is_told in (
        ("127.0.0.1", "same", True), ("127.0.0.1", "other", False), ("203.0.113.7", "same", False),
        *((each, "same", True) for each in own), *((each, "other", False) for each in own),
    ):  # fmt: skip
        body = enroll_request(team, boot_id=boot_id).model_dump_json()
        answer = client.post(
            "/api/v1/hosts/enroll", body, content_type="application/json", REMOTE_ADDR=address
        )
        assert bool(answer.json()["redis_url"]) == is_told, (address, boot_id)


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


def test_a_host_measures_its_way_by_no_more_than_two_mebibytes(as_host):
    for num_bytes in [0, 1, 2 * 1024**2]:
        answer = as_host.post(f"/hosts/echo?num_bytes={num_bytes}", "x" * num_bytes)
        assert (answer.status_code, len(answer.content)) == (200, num_bytes), num_bytes
    for asked, sent in [(-1, 0), (2 * 1024**2 + 1, 0), (0, 2 * 1024**2 + 1)]:
        answer = as_host.post(f"/hosts/echo?num_bytes={asked}", "x" * sent)
        assert (answer.status_code, answer.json()["code"]) == (413, "too_large"), asked


def test_bytes_are_sent_anew_to_each_request_with_a_key_and_kept_of_none(as_host):
    """Bytes are no text: a reply was to be stored as it, and the key was in use from then on."""
    for _ in range(2):
        answer = as_host.post("/hosts/echo?num_bytes=936", "", **{"Idempotency-Key": "one"})
        assert (answer.status_code, len(answer.content)) == (200, 936)
    assert not StoredReply.objects.exists()


def test_an_operator_asks_once_and_the_beat_tells(as_host, enrolled):
    host, _ = enrolled
    rotation_request(host=host, by="olga")
    assert as_host.post("/hosts/beat", make_beat()).json()["rotate"]
    request = RotateRequest(credential_hash=digest("fresh"), redis_secret_hash=digest("redis"))
    as_host.post("/hosts/rotate", request)
    assert not HostClient("fresh").post("/hosts/beat", make_beat()).json()["rotate"]
    credential_revoke(host=enrolled[0], by="olga")
    with pytest.raises(ConflictProblem, match="enrol it again"):
        rotation_request(host=enrolled[0], by="olga")


# The host's doors about an attempt: claim, events, artefacts.


LINE = ("log", {"stream": "stdout", "text": "hello"})


def claim_request(attempt, claim_id: str = "folder-1") -> ClaimRequest:
    return ClaimRequest(fence=attempt.fence, claim_id=claim_id, boot_id="boot-1")


def test_a_claim_brings_the_spec(as_host, job):
    attempt = job.current_attempt
    answer = as_host.post(f"/attempts/{attempt.pk}/claim", claim_request(attempt))
    assert ClaimReply.model_validate(answer.json()).request.spec.kind == "train"


def test_what_is_not_of_the_claimed_attempt_is_refused_or_unknown(as_host, attempt):
    answer = as_host.post(f"/attempts/{attempt.pk}/claim", claim_request(attempt, "folder-2"))
    assert (answer.status_code, answer.json()["code"]) == (409, "not_claimable")
    answer = as_host.post("/attempts/other/events", batch_of(attempt, LINE))
    assert (answer.status_code, answer.json()["code"]) == (422, "other_attempt")
    answer = as_host.get(f"/attempts/{attempt.pk}/artefacts/model/config.json")
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_artefact")
    batch = batch_of(attempt, *[LINE] * 500)
    assert as_host.post(f"/attempts/{attempt.pk}/events", batch).json()["acked_seq"] == 500
    text = batch.model_dump_json().replace('"events":[', '"events":[' + text_of_one(batch) + ",")
    assert as_host.post(f"/attempts/{attempt.pk}/events", text).status_code == 422


def test_events_run_a_job_to_its_end(as_host, attempt):
    batch = batch_of(attempt, ("started", STARTED), LINE, ("exited", EXIT_OK))
    answer = as_host.post(f"/attempts/{attempt.pk}/events", batch)
    assert answer.json() == {"attempt_id": attempt.pk, "acked_seq": 3}
    assert Job.objects.get(pk=attempt.job_id).state == "succeeded"


def text_of_one(batch) -> str:
    return batch.events[0].model_dump_json()


# Artefacts

WEIGHTS = bytes(range(256)) * 40


@pytest.fixture
def artefact(attempt, settings, tmp_path) -> Artefact:
    settings.ARTEFACTS_DIR = tmp_path
    announce(attempt, {"model.safetensors": WEIGHTS, "sub/config.json": b"{}"})
    return Artefact.objects.get()


def announce(attempt, files: dict[str, bytes]) -> None:
    body = {
        "name": "model",
        "kind": "model",
        "total_bytes": sum(map(len, files.values())),
        "files": {path: len(data) for path, data in files.items()},
        "sha256": {path: hashlib.sha256(data).hexdigest() for path, data in files.items()},
    }
    events_accept(host=attempt.host, batch=batch_of(attempt, ("artefact", body)))


def url(artefact: Artefact, path: str) -> str:
    return f"/attempts/{artefact.attempt_id}/artefacts/{artefact.name}/{path}"


def put(as_host, artefact, path: str, offset: int, data: bytes):
    return as_host.put(f"{url(artefact, path)}?offset={offset}", data)


def test_a_file_starts_from_nothing_and_arrives_in_parts(as_host, artefact):
    answer = as_host.get(url(artefact, "model.safetensors"))
    assert answer.json() == {"received_bytes": 0}
    assert (
        put(as_host, artefact, "model.safetensors", 0, WEIGHTS[:100]).json()["received_bytes"]
        == 100
    )
    answer = put(as_host, artefact, "model.safetensors", 100, WEIGHTS[100:])
    assert answer.json()["received_bytes"] == len(WEIGHTS)
    assert (artefacts.folder_of(artefact) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_part_that_is_repeated_or_starts_elsewhere_changes_nothing(as_host, artefact):
    put(as_host, artefact, "model.safetensors", 0, WEIGHTS[:100])
    answer = put(as_host, artefact, "model.safetensors", 50, b"x" * 10)
    assert answer.json()["received_bytes"] == 100
    for _ in range(2):
        answer = put(as_host, artefact, "model.safetensors", 0, WEIGHTS[:100])
    assert answer.json()["received_bytes"] == 100


def test_the_artefact_is_complete_with_its_last_file(as_host, artefact):
    put(as_host, artefact, "model.safetensors", 0, WEIGHTS)
    assert not Artefact.objects.get().is_complete
    put(as_host, artefact, "sub/config.json", 0, b"{}")
    assert Artefact.objects.get().is_complete


def test_another_digest_starts_again_and_a_file_that_was_not_announced_is_unknown(
    as_host, artefact
):
    answer = put(as_host, artefact, "model.safetensors", 0, b"x" * len(WEIGHTS))
    assert (answer.status_code, answer.json()["code"]) == (409, "digest_differs")
    assert as_host.get(url(artefact, "model.safetensors")).json()["received_bytes"] == 0
    answer = put(as_host, artefact, "extra.bin", 0, b"x")
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_file")


def test_more_than_was_announced_is_refused_and_cut_off(as_host, artefact):
    put(as_host, artefact, "model.safetensors", 0, WEIGHTS[:100])
    answer = put(as_host, artefact, "model.safetensors", 100, WEIGHTS)
    assert answer.status_code == 413
    assert as_host.get(url(artefact, "model.safetensors")).json()["received_bytes"] == 100


def test_a_part_larger_than_a_form_may_be_is_taken(as_host, attempt, settings, tmp_path):
    settings.ARTEFACTS_DIR = tmp_path
    data = bytes(3_000_000)
    announce(attempt, {"big": data})
    answer = put(as_host, Artefact.objects.get(), "big", 0, data)
    assert answer.json()["received_bytes"] == len(data)


def test_an_empty_file_is_complete_with_an_empty_part(as_host, attempt, settings, tmp_path):
    settings.ARTEFACTS_DIR = tmp_path
    announce(attempt, {"empty": b""})
    assert put(as_host, Artefact.objects.get(), "empty", 0, b"").status_code == 200
    assert Artefact.objects.get().is_complete


@pytest.mark.parametrize("path", ["../../outside", "/etc/passwd", "a/../../b", ".hidden", "a\\b"])
def test_a_path_that_climbs_is_refused_even_when_announced(attempt, settings, tmp_path, path):
    settings.ARTEFACTS_DIR = tmp_path / "artefacts"
    announce(attempt, {path: b"x"})
    with pytest.raises(artefacts.InvalidProblem, match="path"):
        artefacts.find(host=attempt.host, attempt_id=attempt.pk, name="model", path=path)


def test_a_full_disk_asks_for_a_pause(as_host, artefact, monkeypatch):
    monkeypatch.setattr(artefacts, "MIN_FREE_BYTES", 2**62)
    answer = put(as_host, artefact, "model.safetensors", 0, WEIGHTS)
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "60")


def test_another_host_sees_no_artefact(artefact, team):
    from tests.webapp.api.conftest import HostClient
    from tests.webapp.conftest import enrol

    _, credential = enrol(team, name="Stranger")
    assert HostClient(credential).get(url(artefact, "model.safetensors")).status_code == 404


def test_events_wait_at_their_host_while_the_disk_is_full(as_host, attempt, monkeypatch):
    monkeypatch.setattr(agents, "MIN_FREE_BYTES", 2**62)
    answer = as_host.post(f"/attempts/{attempt.pk}/events", batch_of(attempt, LINE))
    assert (answer.status_code, answer.json()["code"]) == (429, "disk_full")


# The ASGI branch for beats answers as the API's own operation does.


class Answer(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: dict[str, Any]
    unread: int  # parts of the request


def knock(body: bytes, *headers: tuple[bytes, bytes], parts: int = 1) -> Answer:
    """Return what the server answers to a beat whose body comes in some parts."""
    size = -(-len(body) // parts) or 1
    pieces = [body[start : start + size] for start in range(0, len(body), size)] or [b""]
    sent: list[dict] = []
    path = agents.PATH
    scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}

    async def receive() -> dict:
        if not pieces:
            return {"type": "http.disconnect"}
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def send(message: dict) -> None:
        sent.append(message)

    async_to_sync(asgi.application)(scope, receive, send)
    start, body = sent[0], b"".join(each["body"] for each in sent[1:])
    return Answer(start["status"], dict(start["headers"]), json.loads(body), len(pieces))


def bearer(credential: str) -> tuple[bytes, bytes]:
    return (b"authorization", f"Bearer {credential}".encode())


def said(**changes) -> bytes:
    return make_beat(**changes).model_dump_json().encode()


def test_a_beat_is_stored_and_answered_in_one_part_or_several(credential):
    answer = knock(said(problems=("disk",)), bearer(credential))
    assert (answer.status, answer.headers[b"content-type"]) == (200, b"application/json")
    assert BeatReply.model_validate(answer.body).run_microbench
    assert Host.objects.get().last_beat["problems"] == ["disk"]
    assert knock(said(), bearer(credential), parts=7).status == 200


def test_a_refusal_is_what_the_api_says(credential):
    for body, headers in [
        (b"{", True),
        (b"[]", True),
        (b'{"boot_id": 1}', True),
        (b'{"unknown": 1}', True),
        (said(), False),
    ]:
        own = HostClient(credential if headers else "")
        expected = own.post("/hosts/beat", body.decode())
        answer = knock(body, *([bearer(credential)] if headers else []))
        assert answer.headers[b"content-type"] == b"application/problem+json", body
        assert answer.status in {expected.status_code, 422}  # for no JSON at all, ninja says 400
        assert set(answer.body) == set(expected.json()) | ({"errors"} & set(answer.body)), body


def test_anything_but_a_bearer_token_shows_nobody():
    for header in [
        (b"authorization", b"Basic abc"),
        (b"authorization", b"Bearer "),
        (b"cookie", b"sessionid=1"),
    ]:
        answer = knock(said(), header, parts=3)
        assert (answer.status, answer.body["code"]) == (401, "not_authenticated"), header
        assert answer.unread == 0, header


def test_a_body_without_end_a_wrong_field_and_a_guess_are_refused(credential):
    answer = knock(b" " * (agents.MAX_BODY_BYTES + 1), bearer(credential), parts=3)
    assert (answer.status, answer.body["code"]) == (413, "too_large")
    assert answer.headers[b"connection"] == b"close"
    assert str(agents.MAX_BODY_BYTES) in answer.body["detail"]
    answer = knock(said().replace(b'"boot_id":"boot-1"', b'"boot_id":7'), bearer(credential))
    assert (answer.status, answer.body["errors"][0]["field"]) == (422, "boot_id")
    answer = knock(said(), bearer(credential + "x"))
    assert (answer.status, answer.body["code"]) == (401, "unknown_credential")


def test_a_database_in_trouble_asks_the_host_to_come_back(credential, monkeypatch):
    def locked(_heard):
        raise DatabaseError("database is locked")

    monkeypatch.setattr(heartbeats, "answers_to", locked)
    answer = knock(said(), bearer(credential))

    assert (answer.status, answer.headers[b"retry-after"]) == (429, b"5")
    assert "locked" not in answer.body["detail"]


def test_another_method_is_the_apis_to_answer():
    assert not agents.is_beat({"path": agents.PATH, "method": "GET"})
