"""Code that meets the schema of a newer version starts nothing and says both versions."""

import asyncio
import os
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
from django.core.management import get_commands
from django.db import OperationalError, connection

from tests.stack import ROOT, copy_migrated, free_port
from webapp import asgi
from webapp.boot import cli
from webapp.boot.console import Problem
from webapp.core import schema
from webapp.core.schema import SchemaTooNewError

ENTRANCES = [
    ["manage.py", "control"],
    ["manage.py", "ticker"],
    ["manage.py", "prepare"],
    ["manage.py", "up", "--port"],
    ["-m", "uvicorn", "webapp.asgi:application", "--port"],
]


@pytest.fixture
def newer(db) -> None:
    """A migration of the future in the database of the test."""
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO django_migrations (app, name, applied) VALUES "
            "('hosts', '9999_future', CURRENT_TIMESTAMP), ('later', '0001_new', CURRENT_TIMESTAMP)"
        )


@pytest.mark.django_db(databases=["default", "metrics"])
def test_the_own_schema_is_no_newer():
    schema.check_schema()


def test_a_newer_schema_is_refused_with_both_versions_and_the_way_out(newer):
    with pytest.raises(SchemaTooNewError) as refusal:
        schema.check_schema()

    last = schema.known_migrations()["hosts"][-1]
    assert "hosts.9999_future, later.0001_new" in str(refusal.value)
    assert f"this is Slipway 0.1.0, which knows hosts.{last}, no later" in str(refusal.value)
    assert "Start the newer version" in str(refusal.value)


def test_a_migration_that_was_squashed_away_is_no_newer_one():
    assert schema.newer_migrations({"hosts": ["0001_of_old", "0002_control"]}) == []


def test_another_migration_of_the_same_number_is_unknown():
    assert schema.newer_migrations({"hosts": ["9999_one"]}) == ["hosts.9999_one"]


@pytest.mark.parametrize("command", sorted({*get_commands()} - cli.WITHOUT_SCHEMA))
def test_every_command_that_works_with_the_database_is_refused(newer, command):
    with pytest.raises(Problem, match=r"hosts\.9999_future"):
        cli._django([command])


@pytest.mark.parametrize("command", ["backup", "restore", "doctor"])
def test_what_helps_out_of_a_newer_schema_still_runs(newer, command, capsys):
    with pytest.raises(SystemExit):
        cli._django([command, "--help"])

    assert f"manage.py {command}" in capsys.readouterr().out


def lifespan() -> list[dict]:
    """What the web process answers to a server that starts it."""
    sent = []

    async def drive() -> None:
        asked = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

        async def receive() -> dict:
            return next(asked)

        async def send(message: dict) -> None:
            sent.append(message)

        await asgi.application({"type": "lifespan"}, receive, send)

    asyncio.run(drive())
    return sent


def test_the_web_process_does_not_start_on_a_newer_schema(monkeypatch):
    def refuse() -> None:
        raise SchemaTooNewError("newer")

    monkeypatch.setattr(asgi, "check_schema", refuse)

    assert lifespan() == [{"type": "lifespan.startup.failed", "message": "newer"}]


def test_the_web_process_starts_while_the_database_is_away(monkeypatch):
    def fail() -> None:
        raise OperationalError("away")

    monkeypatch.setattr(asgi, "check_schema", fail)

    assert next(message["type"] for message in lifespan()) == "lifespan.startup.complete"


@pytest.fixture(scope="module")
def future_site(tmp_path_factory):
    """A data folder that a newer version has migrated."""
    data = tmp_path_factory.mktemp("future")
    copy_migrated(data)
    with closing(sqlite3.connect(data / "slipway.sqlite3")) as rows, rows:
        rows.execute(
            "CREATE TABLE IF NOT EXISTS django_migrations "
            "(id integer PRIMARY KEY, app text, name text, applied text)"
        )
        rows.execute(
            "INSERT INTO django_migrations (app, name, applied) VALUES ('jobs', '9999_x', '2030-01-01')"
        )
    return data


@pytest.mark.slow
@pytest.mark.parametrize("words", ENTRANCES, ids=lambda words: words[-2] + words[-1])
def test_every_entrance_refuses_in_words(future_site, words):
    port = [str(free_port())] if words[-1] == "--port" else []
    done = subprocess.run(
        [sys.executable, *words, *port],
        cwd=ROOT,
        env=os.environ | {"SLIPWAY_DATA_DIR": str(future_site)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert done.returncode != 0
    assert "has the schema of a newer version (jobs.9999_x)" in done.stderr
    assert "which knows jobs.00" in done.stderr
    assert "Traceback" not in done.stderr
