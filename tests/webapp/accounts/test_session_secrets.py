"""What a session keeps for a page to come: nothing that reads as a secret in the database."""

import re

import pytest
from cryptography.fernet import Fernet
from django.contrib.sessions.models import Session

from tests.webapp.conftest import client_of
from webapp.core import vault
from webapp.hosts.models import EnrolmentToken

pytestmark = pytest.mark.django_db(databases="__all__")


def sessions() -> str:
    """Return what every session of the database holds, decoded."""
    return str([row.get_decoded() for row in Session.objects.all()])


def token_shown(client) -> str:
    """Make an enrolment token and return it as the page shows it."""
    page = client.post("/hosts/add/", {"name": "box", "pool": "default"}, follow=True)
    found = re.search(r"slt_[\w-]+", page.content.decode())
    assert found is not None
    return found[0]


def test_no_session_holds_an_enrolment_token(olga):
    client = client_of(olga)

    token = token_shown(client)

    assert token not in sessions()
    assert "slt_" not in sessions()
    assert token not in str(EnrolmentToken.objects.values())
    assert EnrolmentToken.objects.get().pk in sessions()  # it is kept, and sealed


def test_a_token_whose_key_is_gone_is_not_shown_and_breaks_nothing(olga, monkeypatch):
    client = client_of(olga)
    token_shown(client)
    monkeypatch.setenv(vault.VARIABLE, Fernet.generate_key().decode())

    page = client.get(f"/hosts/add/{EnrolmentToken.objects.get().pk}/")

    assert page.status_code == 200
    assert "slt_" not in page.content.decode()
