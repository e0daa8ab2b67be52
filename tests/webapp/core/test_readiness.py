"""A server waits for the migrations and static files of its version, and says for which."""

import os
import signal

import pytest
from django.core.files.storage import InMemoryStorage
from django.db import DatabaseError

from webapp.core import readiness


class Executor:
    """Of a database that lacks some migrations."""

    def __init__(self, lacking):
        self.loader = self.graph = self
        self.leaf_nodes, self.migration_plan = list, lambda _: [(each, False) for each in lacking]


@pytest.fixture
def storage(monkeypatch):
    storage = InMemoryStorage()
    storage.manifest_name = "staticfiles.json"
    monkeypatch.setattr(readiness, "staticfiles_storage", storage)
    return storage


def test_a_server_starts_once_files_and_migrations_are_there(storage, monkeypatch, capsys):
    lacking, steps = ["jobs.0002"], []
    monkeypatch.setattr(readiness, "MigrationExecutor", lambda _: Executor(lacking))

    def prepare(_seconds):
        storage.open("staticfiles.json", "w").close()
        steps.append(readiness.missing_preparation())
        if len(steps) > 1:
            lacking.clear()

    before = signal.getsignal(signal.SIGTERM)
    readiness.await_preparation(prepare)
    words = "1 migrations are not applied, the first of them jobs.0002"
    assert steps == [words, words]
    assert capsys.readouterr().err == "".join(
        f"Waiting for `manage.py prepare`: {each}.\n"
        for each in ("static files are not collected", words)
    )
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_waiting_server_ends_on_request(storage):
    with pytest.raises(SystemExit) as ended:
        readiness.await_preparation(lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert ended.value.code == 0


def test_a_server_starts_without_its_database_whose_absence_its_pages_say(storage, monkeypatch):
    def gone(_):
        raise DatabaseError("gone")

    storage.open("staticfiles.json", "w").close()
    monkeypatch.setattr(readiness, "MigrationExecutor", gone)
    monkeypatch.setattr(readiness, "_is_prepared", readiness.threading.Event())
    readiness.await_preparation(pytest.fail)
    assert not readiness.is_prepared()
