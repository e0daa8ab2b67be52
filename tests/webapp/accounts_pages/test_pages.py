"""Logging in and out, the theme, and the pages that say no."""

import pytest
from django.contrib.auth.models import User
from django.template.loader import render_to_string
from django.test import Client

from tests.webapp.conftest import client_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def known() -> User:
    return User.objects.create_user("alice", password="correct horse")


def log_in(client: Client, password: str):
    return client.post("/login/", {"username": "alice", "password": password})


@pytest.mark.parametrize(
    "path", ["/", "/plans/", "/models/", "/techniques/", "/docs/", "/search/"]
)
def test_a_stranger_is_asked_to_log_in(client, db, path):
    response = client.get(path)

    assert response.status_code == 302
    assert response["Location"].startswith("/login/")


def test_the_right_password_opens_home(client, known):
    assert log_in(client, "correct horse")["Location"] == "/"


def test_a_wrong_password_says_so_and_gives_nothing_away(client, known):
    html = log_in(client, "wrong").content.decode()

    assert "do not go together" in html
    assert "wrong" not in html.split("<form")[1]


def test_logging_out_closes_the_pages(alice):
    client = client_of(alice)

    client.post("/logout/")

    assert client.get("/plans/").status_code == 302


def test_the_theme_is_kept_in_a_cookie_and_drawn_by_the_server(alice):
    client = client_of(alice)

    response = client.post("/theme/", {"theme": "dark", "next": "/plans/"})

    assert response["Location"] == "/plans/"
    assert 'data-theme="dark"' in client.get("/plans/").content.decode()


def test_the_system_theme_sets_no_attribute(alice):
    client = client_of(alice)
    client.post("/theme/", {"theme": "system"})

    assert "data-theme=" not in client.get("/plans/").content.decode()


def test_a_theme_that_is_none_is_not_kept(alice):
    response = client_of(alice).post("/theme/", {"theme": "<script>"})

    assert "theme" not in response.cookies


def test_a_forged_cookie_draws_nothing(alice):
    client = client_of(alice)
    client.cookies["theme"] = '"><script>'

    assert "data-theme=" not in client.get("/plans/").content.decode()


def test_the_theme_switch_leads_to_no_other_site(alice):
    data = {"theme": "dark", "next": "https://elsewhere.example/"}

    assert client_of(alice).post("/theme/", data)["Location"] == "/"


def test_what_is_not_there_gets_a_page_with_a_way_out(alice):
    response = client_of(alice).get("/nothing/here/")

    assert response.status_code == 404
    assert "There is nothing at this address" in response.content.decode()


def test_what_a_role_does_not_allow_names_the_role(vera):
    response = client_of(vera).get("/plans/new/")

    assert response.status_code == 403
    assert "Practitioner" in response.content.decode()


def test_an_old_form_gets_a_page_with_a_way_out(alice):
    client = Client(enforce_csrf_checks=True)
    client.force_login(alice)

    response = client.post("/theme/", {"theme": "dark"})

    assert response.status_code == 403
    assert "too old to be trusted" in response.content.decode()


def test_the_page_for_our_own_faults_needs_nothing_that_may_be_broken():
    html = render_to_string("500.html")

    assert "your work did not" in html


def test_the_account_menu_says_role_and_team(alice, team):
    html = client_of(alice).get("/").content.decode()

    assert "Practitioner" in html
    assert "Alice&#x27;s team" in html


def test_no_page_carries_an_inline_script(alice):
    html = client_of(alice).get("/").content.decode()

    assert "<script>" not in html
    assert " onclick=" not in html
