"""What every answer of the site has: headers, methods, where it lets a browser go."""

import asyncio
import re

import httptools
import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.core import signing
from django.core.signing import BadSignature
from django.test import Client
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.webapp.accounts.test_matrix import RULES
from tests.webapp.accounts.test_roles import filled
from tests.webapp.conftest import client_of
from webapp.asgi import application
from webapp.core.site_settings import public_site
from webapp.live.stream import SALT, read_ticket

pytestmark = pytest.mark.django_db(databases="__all__")
ANY_METHOD = {"healthz", "readyz", "api/v1/docs"}  # answered like GET
BARE = {"login/", "password/forgotten/", "password/new/<slug:uid>/<slug:token>/"}


@pytest.fixture
def behind_tls(settings) -> None:
    """The site as it is configured behind a TLS proxy."""
    for name, value in public_site("https://testserver").items():
        setattr(settings, name, value)


def test_every_answer_of_a_page_has_the_headers_of_a_site_behind_tls(olga, behind_tls):
    client = client_of(olga)
    for route in RULES:
        answer = client.get(filled(route), secure=True)
        headers, kind = answer.headers, answer.headers.get("Content-Type", "")
        assert headers["X-Content-Type-Options"] == "nosniff", route
        assert headers["Referrer-Policy"] == "same-origin", route
        sent = headers["Strict-Transport-Security"]
        assert sent == "max-age=31536000; includeSubDomains", route
        for rule in ("frame-ancestors 'none'", "base-uri 'none'", "object-src 'none'"):
            assert rule in headers["Content-Security-Policy"], route
        assert not [name for name in headers if name.lower().startswith("access-control-")], route
        assert "charset=utf-8" in kind or not kind.startswith("text/"), (route, kind)
        is_page = answer.status_code == 200 and kind.startswith("text/html")
        if is_page and "<main" in answer.content.decode() and route not in BARE:
            assert 'action="/logout/"' in answer.content.decode(), route


def test_answers_without_django_and_to_a_wrong_name_have_them_too(behind_tls):
    for path, method, host in (
        ("/live/", "GET", b"testserver"),
        ("/api/v1/hosts/beat", "POST", b"testserver"),
        ("/login/", "GET", b"elsewhere.example"),
        ("/login/", "GET", b"testserver"),
    ):
        sent = []
        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(),
            "query_string": b"", "root_path": "", "scheme": "https", "http_version": "1.1",
            "headers": [(b"host", host)], "client": ("127.0.0.1", 1), "server": ("x", 80),
        }  # fmt: skip

        bodies = [b""]

        async def receive(bodies=bodies):
            if not bodies:
                await asyncio.sleep(60)  # the client stays, and is no longer waited for
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}

        async def send(message, sent=sent):
            sent.append(message)

        async_to_sync(application)(scope, receive, send)
        names = [name.lower() for name, _ in sent[0]["headers"]]
        for name in (b"x-content-type-options", b"strict-transport-security"):
            assert names.count(name) == 1, (path, host, name)


def test_cookies_are_of_this_host_and_out_of_reach_of_scripts_and_other_sites(behind_tls):
    User.objects.create_user("dora", password="correct horse")
    keys = set()
    for _ in range(2):
        client = Client()
        client.get("/login/", secure=True)
        client.post("/login/", {"username": "dora", "password": "correct horse"}, secure=True)
        keys.add(client.cookies["__Host-session"].value)
    assert set(client.cookies) == {"__Host-session", "__Host-visitor"}
    for cookie in client.cookies.values():
        assert all(cookie[name] for name in ("secure", "httponly", "samesite")), cookie
        assert (cookie["path"], cookie["domain"]) == ("/", "")
    assert len(keys) == 2
    assert all(re.fullmatch("[a-z0-9]{32}", key) for key in keys)  # 165 bits


def test_no_address_echoes_a_request_lists_a_folder_or_serves_the_repository(olga):
    for client in (Client(), client_of(olga)):
        for route in RULES:
            answer = client.trace(filled(route), headers={"X-Marker": "echoed"})
            assert answer.status_code in {302, 401, 403, 404, 405} or route in ANY_METHOD, route
            assert b"echoed" not in answer.content, route
        for path in ("/.git/config", "/.git/", "/static/", "/static/js/", "/static/../manage.py"):
            assert client.get(path).status_code in {302, 404}, path


def test_a_field_counts_in_the_place_that_it_belongs_to_alone(alice):
    User.objects.create_user("dora", password="correct horse")
    visitor = Client()
    visitor.post("/login/?username=dora&password=correct+horse")
    assert visitor.get("/jobs/").status_code == 302
    assert "theme" not in client_of(alice).post("/theme/?theme=dark").cookies


def test_a_ticket_is_what_was_signed_as_one():
    signed = {"u": 1, "t": []}
    assert read_ticket(signing.TimestampSigner(salt=SALT).sign_object(signed)) == (1, ())
    for other in (signing.TimestampSigner().sign_object(signed), signing.dumps(signed)):
        with pytest.raises(BadSignature):
            read_ticket(other)


def test_a_request_whose_end_is_not_certain_is_refused_by_the_server():
    assert AutoHTTPProtocol is HttpToolsProtocol
    for length in (
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: +5",
        "Transfer-Encoding: chunked, identity",
        "Transfer-Encoding : chunked",
    ):
        parser = httptools.HttpRequestParser(object())
        request = f"POST / HTTP/1.1\r\nHost: slipway\r\n{length}\r\n\r\n0\r\n\r\n"
        with pytest.raises(httptools.HttpParserError):
            parser.feed_data(request.encode())
