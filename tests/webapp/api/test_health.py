"""Alive, and able to work."""

import pytest
from django.db import DatabaseError

from webapp.api import health

pytestmark = pytest.mark.django_db


def test_a_living_process_says_so_without_a_login(client):
    assert client.get("/healthz").json() == {"status": "ok"}


def test_it_is_ready_with_a_database_and_a_broker(client, redis_server):
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["broker"]) == (200, True)


def test_without_a_broker_it_is_ready_and_says_what_is_missing(client, settings, tmp_path):
    settings.REDIS_URL = f"unix://{tmp_path}/nobody.sock"
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["broker"]) == (200, False)


def test_without_a_database_it_is_not_ready(client, monkeypatch):
    class Broken:
        def cursor(self):
            raise DatabaseError("gone")

    monkeypatch.setattr(health, "connection", Broken())
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["status"]) == (503, "not ready")
