"""A full disk, a locked or absent database: every address answers in words, none with 500."""

import errno
import sqlite3
from contextlib import closing, contextmanager

import pytest
from django.db import (
    DatabaseError,
    InterfaceError,
    InternalError,
    OperationalError,
    ProgrammingError,
    connection,
    connections,
)
from django.db.backends.utils import CursorWrapper
from django.test import Client
from django.test.utils import CaptureQueriesContext

from tests.plugins.extent import sample
from tests.webapp.accounts.test_matrix import RULES
from tests.webapp.accounts.test_roles import filled
from tests.webapp.api.test_agents_api import bearer, knock, said
from tests.webapp.conftest import client_of
from webapp.accounts import tokens
from webapp.accounts.models import AccessToken
from webapp.accounts.sign_in import AUTHENTICATED_AT, SEEN_EVERY
from webapp.accounts.tokens import token_make
from webapp.core.clock import now
from webapp.core.outages import outage_of

pytestmark = pytest.mark.django_db(databases="__all__")
WRITES = ("INSERT", "UPDATE", "DELETE", "REPLACE")


@contextmanager
def failing(monkeypatch, words: str, *, only_writes: bool):
    """Have the database fail as the words say, at every statement or at those that write."""
    execute = CursorWrapper.execute

    def fail(self, sql, params=None):
        if not only_writes or str(sql).lstrip().upper().startswith(WRITES):
            raise OperationalError(words)
        return execute(self, sql, params)

    with monkeypatch.context() as patch:
        patch.setattr(CursorWrapper, "execute", fail)
        yield


def forget_failures() -> None:
    """Let the transaction around the test go on: outside of tests there is none."""
    for each in connections.all(initialized_only=True):
        each.needs_rollback = False


def quiet(client: Client) -> Client:
    client.raise_request_exception = False
    return client


@pytest.mark.parametrize("only_writes", [True, False], ids=["disk-full", "database-away"])
def test_no_address_answers_500(olga, credential, monkeypatch, only_writes):
    words = "database or disk is full" if only_writes else "connection refused"
    people = [quiet(Client()), quiet(client_of(olga))]
    host = quiet(Client(headers={"Authorization": f"Bearer {credential}"}))
    found = {}
    with failing(monkeypatch, words, only_writes=only_writes):
        for route in sample(RULES, share=0.4, kind=lambda route: route.split("/")[0]):
            clients = [host] if route.startswith(("api/v1/hosts", "api/v1/attempts")) else people
            for client in clients:
                for method in ("get", "post"):
                    answer = getattr(client, method)(filled(route))
                    forget_failures()
                    if answer.status_code >= 500:
                        found[method, route] = answer

    assert {
        key: answer.status_code for key, answer in found.items() if answer.status_code != 503
    } == {}
    assert found
    for (_, route), answer in found.items():
        if route != "readyz":
            assert int(answer.headers["Retry-After"]) >= 5, route
            assert b"Traceback" not in answer.content


def test_a_page_says_it_in_the_products_look(olga, monkeypatch):
    client = quiet(client_of(olga))
    with failing(monkeypatch, "database is locked", only_writes=False):
        answer = client.get("/jobs/")
    text = answer.content.decode()
    assert answer.status_code == 503
    assert "The database is locked by another process." in text
    assert "css/tokens" in text
    assert "500" not in text


def test_the_api_says_it_as_a_problem_document(olga, monkeypatch):
    client = quiet(client_of(olga))
    with failing(monkeypatch, "database or disk is full", only_writes=False):
        answer = client.get("/api/v1/jobs/01ABC/events")
    assert answer.status_code == 503
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.json()["code"] == "disk_full"
    assert answer.headers["Retry-After"] == "30"


def test_a_login_on_a_full_disk_is_answered_in_words(monkeypatch, alice):
    with failing(monkeypatch, "database or disk is full", only_writes=True):
        assert Client().get("/login/").status_code == 200
    with failing(monkeypatch, "database or disk is full", only_writes=True):
        answer = quiet(Client()).post("/login/", {"username": "alice", "password": "x"})
    assert answer.status_code == 503
    assert "disk is full" in answer.content.decode()


READ_BY_TOKEN = ["me", "plans", "jobs", "hosts", "models", "data", "search?q=ab"]


def used_long_ago(team, user) -> tuple[AccessToken, Client]:
    """Return a token whose use is to be noted, and a client that sends it."""
    token, text = token_make(team=team, by=user, name="laptop", scope="read")
    return token, quiet(Client(headers={"Authorization": f"Bearer {text}"}))


@pytest.mark.parametrize(
    "words", ["database or disk is full", "attempt to write a readonly database"]
)
def test_reading_by_token_goes_on_and_its_use_is_noted_later(team, olga, monkeypatch, words):
    token, client = used_long_ago(team, olga)
    with failing(monkeypatch, words, only_writes=True):
        for path in READ_BY_TOKEN:
            assert client.get(f"/api/v1/{path}").status_code == 200, path
            forget_failures()
            tokens.uses.forget()
    assert not AccessToken.objects.get().last_used_at
    assert client.get("/api/v1/jobs").status_code == 200
    token.refresh_from_db()
    assert token.last_used_at


def test_a_note_that_failed_is_not_tried_with_every_request(team, olga, monkeypatch):
    _, client = used_long_ago(team, olga)
    with failing(monkeypatch, "database is locked", only_writes=True):
        client.get("/api/v1/jobs")
        forget_failures()
    with CaptureQueriesContext(connection) as captured:
        assert client.get("/api/v1/jobs").status_code == 200
    assert not any(each["sql"].startswith(("UPDATE", "PRAGMA")) for each in captured)


@pytest.mark.parametrize(
    "path", ["/", "/jobs/", "/plans/", "/hosts/", "/queue/", "/models/", "/docs/"]
)
def test_reading_goes_on_while_nothing_can_be_written(olga, host, monkeypatch, path):
    client = client_of(olga)
    session = client.session
    session[AUTHENTICATED_AT] = now().timestamp() - 2 * SEEN_EVERY.total_seconds()
    session.save()
    with failing(monkeypatch, "database or disk is full", only_writes=True):
        assert client.get(path).status_code == 200


def test_a_session_that_could_not_be_noted_is_noted_later(olga, monkeypatch):
    client = client_of(olga)
    session = client.session
    session[AUTHENTICATED_AT] = now().timestamp() - 2 * SEEN_EVERY.total_seconds()
    session.save()
    with failing(monkeypatch, "database is locked", only_writes=True):
        client.get("/docs/")
    forget_failures()
    assert "seen_at" not in client.session
    fresh = Client()  # another process: it does not rest
    fresh.cookies = client.cookies
    fresh.get("/docs/")
    assert "seen_at" in fresh.session


def test_a_heartbeat_is_told_to_come_again(credential, monkeypatch):
    with failing(monkeypatch, "database is locked", only_writes=False):
        answer = knock(said(), bearer(credential))
    assert answer.status == 503
    assert answer.headers[b"retry-after"] == b"5"


@pytest.mark.django_db(transaction=True, databases="__all__")
@pytest.mark.skipif(connection.vendor != "sqlite", reason="a lock of SQLite's")
def test_a_database_that_is_really_locked(alice, monkeypatch):
    path = connection.settings_dict["NAME"]
    connection.close()
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "timeout", 0.1)
    with closing(sqlite3.connect(path, isolation_level=None)) as locker:
        locker.execute("BEGIN EXCLUSIVE")
        page = quiet(Client()).get("/login/")
        answer = quiet(Client()).post("/login/", {"username": "alice", "password": "x"})
        locker.execute("ROLLBACK")
    connection.close()
    assert page.status_code == 200
    assert answer.status_code == 503
    assert "locked by another process" in answer.content.decode()


@pytest.mark.django_db(transaction=True, databases="__all__")
@pytest.mark.skipif(connection.vendor != "sqlite", reason="a lock of SQLite's")
def test_nothing_that_only_reads_waits_for_a_lock_that_another_process_keeps(
    team, olga, host, monkeypatch
):
    """The waits that SQLite is told are counted, so that no clock decides."""
    _, by_token = used_long_ago(team, olga)
    by_session = quiet(client_of(olga))
    session = by_session.session
    session[AUTHENTICATED_AT] = now().timestamp() - 2 * SEEN_EVERY.total_seconds()
    session.save()
    path = connection.settings_dict["NAME"]
    connection.close()
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "timeout", 1000)
    with closing(sqlite3.connect(path, isolation_level=None)) as locker:
        locker.execute("BEGIN IMMEDIATE")
        for each in READ_BY_TOKEN:
            assert by_token.get(f"/api/v1/{each}").status_code == 200, each
        for each in ("/", "/jobs/", "/hosts/", "/queue/", f"/hosts/{host.slug}/"):
            assert by_session.get(each).status_code == 200, each
        with connection.cursor() as cursor:
            assert cursor.execute("PRAGMA busy_timeout").fetchone()[0] == 1_000_000
        locker.execute("ROLLBACK")
    connection.close()


def test_each_outage_is_known_by_its_words():
    for error, code in [
        (OperationalError("database is locked"), "database_busy"),
        (OperationalError("deadlock detected"), "database_busy"),
        (OperationalError("couldn't get a connection after 5.00 sec"), "database_away"),
        (OperationalError("database or disk is full"), "disk_full"),
        (OperationalError("could not extend file: No space left on device"), "disk_full"),
        (OperationalError("attempt to write a readonly database"), "read_only"),
        (OperationalError("unable to open database file"), "read_only"),
        (InternalError("cannot execute INSERT in a read-only transaction"), "read_only"),
        (OperationalError("no such table: jobs_job"), "schema_incomplete"),
        (DatabaseError("database disk image is malformed"), "database_damaged"),
        (OperationalError("connection refused"), "database_away"),
        (InterfaceError("the connection is closed"), "database_away"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk_full"),
        (OSError(errno.EROFS, "Read-only file system"), "read_only"),
    ]:
        assert outage_of(error).code == code, error


def test_a_fault_of_our_own_is_no_outage():
    for error in [
        None,
        RuntimeError("locked"),
        ProgrammingError("locked"),
        OSError(2, "No such file"),
    ]:
        assert outage_of(error) is None, error
