"""The history's guards, its cuts and retention, on a real PostgreSQL as they are on SQLite."""

import os
import subprocess
import sys

from tests.faults import test_postgres_killed as killed
from tests.stack import ROOT

pytestmark = killed.pytestmark
postgres = killed.postgres
PARTS = ["tests/webapp/audit", "tests/webapp/core/test_pruning.py"]
ASKS = """
from django.db import connection
from webapp.audit.guard import guards_missing
with connection.cursor() as cursor:
    cursor.execute("SELECT version()")
    print(cursor.fetchone()[0], "missing:", guards_missing())
"""


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


def test_every_test_of_the_history_holds_there(postgres):
    done = on(postgres.url, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--create-db", *PARTS)
    assert done.returncode == 0, done.stdout[-3000:]


def test_migrating_sets_every_guard_and_no_table_can_be_emptied(postgres):
    assert on(postgres.url, "manage.py", "migrate", "-v", "0").returncode == 0
    told = on(postgres.url, "manage.py", "shell", "-v", "0", "-c", ASKS).stdout
    assert "PostgreSQL" in told
    assert "missing: []" in told
    empty = "from django.db import connection; connection.cursor().execute('TRUNCATE {}')"
    for table in ("jobs_event", "audit_link", "audit_cut"):
        done = on(postgres.url, "manage.py", "shell", "-v", "0", "-c", empty.format(table))
        assert "append-only" in done.stderr
