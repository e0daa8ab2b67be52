"""The policies for browsers are on every answer: pages, errors, files, the API, streams, beats."""

import re

import pytest
from django.contrib import admin
from django.test import Client

from tests.webapp.accounts.test_matrix import RULES, addresses
from tests.webapp.accounts.test_writing_doors import filled
from tests.webapp.api.conftest import HostClient
from tests.webapp.api.test_beat_door import knock
from tests.webapp.conftest import client_of

pytestmark = pytest.mark.django_db(databases="__all__")
METHODS = ("get", "post", "put", "delete", "options")


def assert_guarded(response) -> None:
    policy = response.headers["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "default-src 'self'" in policy
    assert "object-src 'none'" in policy
    assert re.fullmatch(r"'self'( 'nonce-[\w+/=-]+')?", scripts_of(policy))
    assert_permits_nothing(response.headers["Permissions-Policy"])


def assert_permits_nothing(policy: str) -> None:
    """No power of a browser is left to a page but copying to the clipboard."""
    rules = dict(rule.split("=") for rule in policy.split(", "))
    assert rules.pop("clipboard-write") == "(self)"
    assert set(rules.values()) == {"()"}
    assert {"camera", "microphone", "geolocation", "payment", "usb"} < set(rules)


def scripts_of(policy: str) -> str:
    """Return where scripts may come from."""
    found = re.search(r"script-src ([^;]+)", policy)
    assert found is not None
    return found[1].strip()


def test_every_address_answers_with_the_policy(olga):
    for client in (Client(), client_of(olga)):
        for route in RULES:
            for method in METHODS:
                assert_guarded(getattr(client, method)(filled(route)))


def test_the_administration_answers_with_the_policy(admin_client):
    for route in sorted(set(addresses(admin.site.get_urls()))):
        path = "/admin/" + re.sub(r"<[^>]+>|\(\?P.*", "1", route)
        assert_guarded(admin_client.get(path))


def test_a_page_that_is_missing_or_refused_has_it(alice):
    client = client_of(alice)
    missing, refused = client.get("/nowhere/"), client.get("/audit/")
    assert (missing.status_code, refused.status_code) == (404, 403)
    assert_guarded(missing)
    assert_guarded(refused)


def test_a_change_without_its_token_has_it(alice):
    client = Client(enforce_csrf_checks=True)
    client.force_login(alice)
    refused = client.post("/team/")
    assert refused.status_code == 403
    assert_guarded(refused)


def test_a_page_that_breaks_has_it(alice, monkeypatch):
    def broken(*_args, **_named):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr("webapp.home.views.render", broken)
    client = client_of(alice)
    client.raise_request_exception = False
    answer = client.get("/")
    assert answer.status_code == 500
    assert b"broken on purpose" not in answer.content
    assert_guarded(answer)


def test_a_request_to_a_name_that_is_not_ours_has_it(client):
    answer = client.get("/", headers={"Host": "elsewhere.example"})
    assert answer.status_code == 400
    assert_guarded(answer)


def test_a_redirect_to_tls_has_it(client, settings):
    settings.SECURE_SSL_REDIRECT = True
    answer = client.get("/")
    assert answer.status_code == 301
    assert_guarded(answer)


def test_a_body_that_is_too_large_has_it(credential):
    answer = HostClient(credential).post("/hosts/echo?num_bytes=99999999", "")
    assert answer.status_code == 413
    assert_guarded(answer)


def test_a_form_with_too_many_fields_has_it(alice):
    answer = client_of(alice).post("/team/", {f"field{n}": "1" for n in range(1100)})
    assert answer.status_code == 400
    assert_guarded(answer)


def test_files_of_the_site_have_it(settings):
    settings.SERVESTATIC_AUTOREFRESH = settings.SERVESTATIC_USE_FINDERS = True
    answer = Client().get("/static/js/live.js")
    assert answer.status_code == 200
    assert_guarded(answer)


def test_beats_answer_with_a_policy_that_lets_in_nothing():
    for answer in (knock(b"{}"), knock(b"no json")):
        assert answer.headers[b"content-security-policy"].startswith(b"default-src 'none'")
        assert answer.headers[b"x-content-type-options"] == b"nosniff"
        assert_permits_nothing(answer.headers[b"permissions-policy"].decode())
