"""Transactions are counted in SQLite's own log, whoever made them."""

import sqlite3

import pytest

from webapp.core.benches.crowd import CommitCount


@pytest.fixture
def database(tmp_path):
    """A database with a write-ahead log that never begins anew by itself."""
    link = sqlite3.connect(tmp_path / "db", isolation_level=None)
    link.execute("PRAGMA journal_mode=WAL")
    link.execute("PRAGMA wal_autocheckpoint=0")
    link.execute("CREATE TABLE t (x)")
    yield link
    link.close()


@pytest.fixture
def count(database, tmp_path):
    return CommitCount(tmp_path / "db-wal")


def test_what_was_committed_before_does_not_count(count):
    count.update()
    assert count.commits == 0


def test_each_transaction_counts_once_whatever_it_wrote(database, count):
    for _ in range(3):
        database.execute("BEGIN")
        database.executemany("INSERT INTO t VALUES (?)", [("x" * 5000,)] * 50)
        database.execute("COMMIT")

    count.update()

    assert count.commits == 3


def test_what_was_rolled_back_does_not_count(database, count):
    database.execute("BEGIN")
    database.execute("INSERT INTO t VALUES (1)")
    database.execute("ROLLBACK")

    count.update()

    assert count.commits == 0


def test_reading_is_no_transaction(database, count):
    database.execute("SELECT * FROM t").fetchall()
    count.update()
    assert count.commits == 0


def test_a_log_that_begins_anew_is_counted_on(database, count):
    database.execute("INSERT INTO t VALUES (1)")
    count.update()
    database.execute("PRAGMA wal_checkpoint(RESTART)")
    database.execute("INSERT INTO t VALUES (2)")

    count.update()

    assert count.commits == 2
