"""The administration: a password shown lately, and a row for every write."""

from datetime import timedelta

import pytest
import time_machine
from django.contrib.auth.models import User

from tests.webapp.conftest import client_of
from webapp.accounts.models import Team
from webapp.core.clock import now
from webapp.jobs.models import Event

pytestmark = pytest.mark.django_db(databases="__all__")
PASSWORD = "correct horse battery"


@pytest.fixture
def root(db) -> User:
    return User.objects.create_superuser("root", password=PASSWORD)


def test_a_session_that_was_left_open_does_not_open_the_administration(root):
    client = client_of(root)
    with time_machine.travel(now() + timedelta(minutes=16)):
        answer = client.get("/admin/")
        assert answer.headers["Location"].startswith("/admin/login/")
        assert client.get("/settings/sessions/").status_code == 200


def test_showing_the_password_again_opens_it(root):
    client = client_of(root)
    with time_machine.travel(now() + timedelta(minutes=16)):
        page = client.get("/admin/login/?next=/admin/").content.decode()
        assert "Show your password again" in page
        assert 'value="root"' in page
        sent = {"username": "root", "password": PASSWORD, "next": "/admin/"}
        assert client.post("/admin/login/?next=/admin/", sent).headers["Location"] == "/admin/"
        assert client.get("/admin/").status_code == 200


def test_somebody_who_is_no_staff_is_refused_in_words(olga):
    assert client_of(olga).get("/admin/login/?next=/admin/").status_code == 403


def test_a_write_leaves_who_where_and_which_fields_but_no_value(root):
    sent = {"name": "New team", "memberships-TOTAL_FORMS": 0, "memberships-INITIAL_FORMS": 0}
    client_of(root).post("/admin/accounts/team/add/", sent)

    event = Event.objects.get(kind="admin.write")
    assert (event.actor, event.detail["path"]) == ("root", "/admin/accounts/team/add/")
    assert "name" in event.detail["fields"]
    assert "New team" not in repr(event.detail)


def test_a_form_that_was_refused_leaves_no_row(root):
    client_of(root).post("/admin/accounts/team/add/", {"name": ""})

    assert not Event.objects.filter(kind="admin.write").exists()


def test_looking_leaves_no_row(root):
    client_of(root).get("/admin/accounts/team/")

    assert not Event.objects.exists()


def test_a_write_with_an_old_password_changes_nothing(root):
    client = client_of(root)
    with time_machine.travel(now() + timedelta(minutes=16)):
        client.post("/admin/accounts/team/add/", {"name": "New team"})

    assert not Team.objects.exists()


def test_a_password_is_changed_on_the_products_own_page(root):
    answer = client_of(root).get("/admin/password_change/")

    assert answer.headers["Location"] == "/settings/password/"
