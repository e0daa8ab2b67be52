"""Bodies larger than their address takes are refused before anything reads them."""

import json

import pytest
from asgiref.sync import async_to_sync

from webapp import asgi
from webapp.core.asgi_middleware import ANONYMOUS_BYTES, DEFAULT_BYTES, PART_BYTES, UPLOAD_BYTES

MEBIBYTE = 1024**2
SESSION = (b"cookie", b"sessionid=anything")
BEARER = (b"authorization", b"Bearer anything")


def send_body(path: str, *headers, method="POST", num_parts=600, announced=None):
    """Send parts of a mebibyte each; return the answer and how many parts were read."""
    sent, read = [], 0
    length = [(b"content-length", str(announced).encode())] if announced else []
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1",
        "headers": [(b"host", b"localhost"), *headers, *length],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip

    async def receive():
        nonlocal read
        read += 1
        return {"type": "http.request", "body": bytes(MEBIBYTE), "more_body": read < num_parts}

    async def send(message):
        sent.append(message)

    async_to_sync(asgi.application)(scope, receive, send)
    assert dict(sent[0]["headers"])[b"x-content-type-options"] == b"nosniff"
    return sent[0]["status"], sent[1]["body"], read


@pytest.mark.parametrize(
    ("path", "headers", "method", "limit"),
    [
        ("/login/", [], "POST", ANONYMOUS_BYTES),
        ("/login/", [SESSION], "POST", DEFAULT_BYTES),
        ("/data/upload/", [], "POST", ANONYMOUS_BYTES),
        ("/data/upload/", [SESSION], "POST", UPLOAD_BYTES),
        ("/plans/x/upload/", [SESSION], "POST", UPLOAD_BYTES),
        ("/jobs/x/stop/", [SESSION], "POST", DEFAULT_BYTES),
        ("/api/v1/hosts/enroll", [], "POST", ANONYMOUS_BYTES),
        ("/api/v1/attempts/a/events", [BEARER], "POST", DEFAULT_BYTES),
        ("/api/v1/attempts/a/artefacts/m/f", [BEARER], "PUT", PART_BYTES),
        ("/no/such/page/", [], "GET", ANONYMOUS_BYTES),
    ],
)
def test_no_more_is_read_than_an_address_takes(path, headers, method, limit):
    status, body, read = send_body(path, *headers, method=method)

    assert (status, read) == (413, limit // MEBIBYTE + 1)
    assert str(limit) in body.decode()


def test_an_announced_length_is_refused_before_a_byte_is_read():
    status, body, read = send_body("/api/v1/hosts/enroll", announced=599 * MEBIBYTE)

    assert (status, read) == (413, 0)
    assert json.loads(body)["code"] == "too_large"
