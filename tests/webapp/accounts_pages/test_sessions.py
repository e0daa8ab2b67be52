"""Where a person is logged in: seen, ended, and over after half a day."""

from datetime import timedelta

import pytest
import time_machine
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.middleware.csrf import CSRF_SESSION_KEY
from django.test import Client

from tests.webapp.conftest import client_of
from webapp.accounts.models import OpenSession
from webapp.accounts.sessions import sessions_forget_ended
from webapp.core.clock import now

pytestmark = pytest.mark.django_db(databases="__all__")


def is_in(client: Client) -> bool:
    return client.get("/settings/sessions/").status_code == 200


def end(client: Client, which: str) -> None:
    client.post("/settings/sessions/end/", {"session": which})


def test_the_page_lists_every_browser_of_the_person_and_nobody_elses(alice, bob):
    here, _ = client_of(alice), client_of(alice)
    client_of(bob)

    listed = here.get("/settings/sessions/").context["open_sessions"]
    assert [row.user for row in listed] == [alice, alice]


def test_a_session_that_is_ended_is_out_at_its_next_request(alice):
    here, there = client_of(alice), client_of(alice)
    row = OpenSession.objects.get(session_key=there.session.session_key)

    end(here, row.pk)

    assert (is_in(here), is_in(there)) == (True, False)


def test_every_other_browser_is_logged_out_at_once(alice):
    here, others = client_of(alice), [client_of(alice) for _ in range(3)]

    end(here, "others")

    assert is_in(here)
    assert not any(is_in(other) for other in others)


def test_nobody_ends_the_session_of_somebody_else(alice, bob):
    theirs = client_of(bob)
    row = OpenSession.objects.get(user=bob)

    end(client_of(alice), row.pk)

    assert is_in(theirs)


def test_the_key_of_a_session_is_on_no_page(alice):
    here, there = client_of(alice), client_of(alice)

    text = here.get("/settings/sessions/").content.decode()
    assert there.session.session_key not in text
    assert here.session.session_key not in text


def test_a_session_that_is_not_used_is_over_after_twelve_hours(alice):
    client = client_of(alice)
    with time_machine.travel(now() + timedelta(hours=13)):
        assert not is_in(client)


def test_a_session_in_use_goes_on(alice):
    client, began = client_of(alice), now()
    for hours in (8, 16, 24):
        with time_machine.travel(began + timedelta(hours=hours)):
            assert is_in(client)


def test_a_new_password_ends_every_browser(alice):
    browsers = [client_of(alice) for _ in range(2)]
    User.objects.get(pk=alice.pk).set_password("battery staple")
    user = User.objects.get(pk=alice.pk)
    user.set_password("battery staple")
    user.save()

    assert not any(is_in(browser) for browser in browsers)


def test_what_is_over_is_forgotten(alice):
    client_of(alice)
    with time_machine.travel(now() + timedelta(hours=13)):
        assert sessions_forget_ended() == 1
    assert not OpenSession.objects.exists()


def test_a_visitor_has_no_session_and_a_form_token_of_this_host_alone(client):
    page = client.get("/login/")

    assert "csrfmiddlewaretoken" in page.content.decode()
    assert list(client.cookies) == ["visitor"]
    assert client.cookies["visitor"]["httponly"]
    assert Session.objects.count() == 0


def test_tokens_of_whoever_is_logged_in_are_in_the_session_and_in_no_cookie():
    User.objects.create_user("dora", password="correct horse")
    client = Client(enforce_csrf_checks=True)
    client.get("/login/")
    secret = client.cookies["visitor"].value
    form = {"username": "dora", "password": "correct horse"}
    client.post("/login/", form | {"csrfmiddlewaretoken": secret})

    client.cookies["visitor"] = "x" * 32
    page = client.get("/")

    assert client.session.get_expiry_age() == 12 * 3600
    assert client.session[CSRF_SESSION_KEY] != secret
    assert page.status_code == 200
    assert client.post("/logout/", {"csrfmiddlewaretoken": "x" * 32}).status_code == 403


def test_a_log_in_without_the_visitors_token_is_refused():
    User.objects.create_user("dora", password="correct horse")
    client = Client(enforce_csrf_checks=True)

    answer = client.post("/login/", {"username": "dora", "password": "correct horse"})

    assert answer.status_code == 403
