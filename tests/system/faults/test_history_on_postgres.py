"""The history's guards and cuts, two schedulers of one machine, the indexes of pages, and the site
of the bench of pages, on a real PostgreSQL.

The history's tests and its retention hold there as they do on SQLite; the schedulers do run at
once there, and its EXPLAIN says which index answers a page.
"""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.stack import ROOT
from tests.system.faults import test_postgres_killed as killed

pytestmark = killed.pytestmark
RACE = (
    "tests/webapp/queue/test_one_machine.py"
    "::test_a_scheduler_waits_for_another_that_gives_the_same_machine_out"
)
INDEXES = "tests/webapp/core/test_lists.py"
LONG_HISTORY = (
    "tests/webapp/core/test_benches.py"
    "::test_the_site_has_as_many_jobs_as_were_asked_for_and_each_page_is_timed"
)
PARTS = ["tests/webapp/audit", "tests/webapp/core/test_upkeep.py", RACE, INDEXES, LONG_HISTORY]
ASKS = """
from django.core.management import call_command
from django.db import DatabaseError, connection
from webapp.audit.guard import guards_missing
call_command("migrate", verbosity=0)
with connection.cursor() as cursor:
    cursor.execute("SELECT version()")
    print(cursor.fetchone()[0], "missing:", guards_missing())
    for table in ("jobs_event", "audit_link", "audit_cut"):
        try:
            cursor.execute(f"TRUNCATE {table}")
        except DatabaseError as error:
            print(table, error)
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a server of this module's own."""
    with killed.serving() as postgres:
        yield postgres.url


def on(url: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with an installation whose database lies there."""
    environment = os.environ | {"DATABASE_URL": url, "SLIPWAY_TEST_DATABASE_URL": url}
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_every_test_of_the_history_and_of_the_race_for_a_machine_holds_there(url):
    done = on(url, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--create-db", *PARTS)
    assert done.returncode == 0, done.stdout[-3000:]


def test_migrating_sets_every_guard_and_no_table_can_be_emptied(url):
    done = on(url, "manage.py", "shell", "-v", "0", "-c", ASKS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "PostgreSQL" in done.stdout
    assert "missing: []" in done.stdout
    for table in ("jobs_event", "audit_link", "audit_cut"):
        (told,) = [line for line in done.stdout.splitlines() if line.startswith(table)]
        assert "append-only" in told
