"""The ASGI branch for beats answers as the API's own operation does."""

import json
from typing import Any, NamedTuple

import pytest
from asgiref.sync import async_to_sync
from django.db import DatabaseError

from runners.messages import BeatReply
from tests.webapp.api.conftest import HostClient
from tests.webapp.conftest import make_beat
from webapp import asgi
from webapp.api import heartbeat_endpoint
from webapp.hosts import heartbeats
from webapp.hosts.models import Host

pytestmark = pytest.mark.django_db(databases="__all__")


class Answer(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: dict[str, Any]


def knock(body: bytes, *headers: tuple[bytes, bytes], parts: int = 1) -> Answer:
    """Return what the server answers to a beat whose body comes in some parts."""
    size = -(-len(body) // parts) or 1
    pieces = [body[start : start + size] for start in range(0, len(body), size)] or [b""]
    sent: list[dict] = []
    scope = {
        "type": "http",
        "method": "POST",
        "path": heartbeat_endpoint.PATH,
        "headers": list(headers),
    }

    async def receive() -> dict:
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def send(message: dict) -> None:
        sent.append(message)

    async_to_sync(asgi.application)(scope, receive, send)
    start, end = sent
    return Answer(start["status"], dict(start["headers"]), json.loads(end["body"]))


def bearer(credential: str) -> tuple[bytes, bytes]:
    return (b"authorization", f"Bearer {credential}".encode())


def said(**changes) -> bytes:
    return make_beat(**changes).model_dump_json().encode()


def test_a_beat_is_stored_and_answered(credential):
    answer = knock(said(problems=("disk",)), bearer(credential))

    assert (answer.status, answer.headers[b"content-type"]) == (200, b"application/json")
    assert BeatReply.model_validate(answer.body).run_microbench
    assert Host.objects.get().last_beat["problems"] == ["disk"]


def test_a_body_may_come_in_parts(credential):
    assert knock(said(), bearer(credential), parts=7).status == 200


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"{", True),
        (b"[]", True),
        (b'{"boot_id": 1}', True),
        (b'{"unknown": 1}', True),
        (said(), False),
    ],
)
def test_a_refusal_is_what_the_api_says(credential, body, headers):
    own = HostClient(credential if headers else "")
    expected = own.post("/hosts/beat", body.decode())

    answer = knock(body, *([bearer(credential)] if headers else []))

    assert answer.headers[b"content-type"] == b"application/problem+json"
    assert answer.status in {expected.status_code, 422}  # for no JSON at all, ninja says 400
    assert set(answer.body) == set(expected.json()) | ({"errors"} & set(answer.body))


def test_a_wrong_field_is_named(credential):
    answer = knock(said().replace(b'"boot_id":"boot-1"', b'"boot_id":7'), bearer(credential))

    assert (answer.status, answer.body["errors"][0]["field"]) == (422, "boot_id")


@pytest.mark.parametrize(
    "header",
    [
        (b"authorization", b"Basic abc"),
        (b"authorization", b"Bearer "),
        (b"cookie", b"sessionid=1"),
    ],
)
def test_anything_but_a_bearer_token_shows_nobody(header):
    answer = knock(said(), header)

    assert (answer.status, answer.body["code"]) == (401, "not_authenticated")


def test_a_guessed_credential_is_unknown(credential):
    answer = knock(said(), bearer(credential + "x"))

    assert (answer.status, answer.body["code"]) == (401, "unknown_credential")


def test_a_body_without_end_is_cut_off(credential):
    answer = knock(b" " * (heartbeat_endpoint.MAX_BODY_BYTES + 1), bearer(credential), parts=3)

    assert (answer.status, answer.body["code"]) == (413, "too_large")
    assert str(heartbeat_endpoint.MAX_BODY_BYTES) in answer.body["detail"]


def test_a_database_in_trouble_asks_the_host_to_come_back(credential, monkeypatch):
    def locked(_heard):
        raise DatabaseError("database is locked")

    monkeypatch.setattr(heartbeats, "answers_to", locked)
    answer = knock(said(), bearer(credential))

    assert (answer.status, answer.headers[b"retry-after"]) == (429, b"5")
    assert "locked" not in answer.body["detail"]


def test_another_method_is_the_apis_to_answer():
    assert not heartbeat_endpoint.is_beat({"path": heartbeat_endpoint.PATH, "method": "GET"})
