"""What no request may do is held on a real PostgreSQL too, which keeps less text than SQLite."""

from collections.abc import Iterator

import pytest

from tests.plugins.extent import first
from tests.system.faults import test_postgres_killed as killed
from tests.system.faults.test_history_on_postgres import on

pytestmark = killed.pytestmark
FILE = "tests/webapp/core/test_hostile_requests.py"
# The whole file nightly; in the suite the queries, where 13 addresses answered 500 to a NUL.
CHOSEN = first([["-k", "query or cookie or visitor"], ["-k", "form or argument or api or file"]])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a server of this module's own."""
    with killed.serving() as postgres:
        yield postgres.url


@pytest.mark.parametrize("chosen", CHOSEN, ids=lambda words: words[-1])
def test_no_request_is_a_fault_there(url, chosen):
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--create-db", FILE, *chosen]
    done = on(url, *words)
    assert done.returncode == 0, done.stdout[-3000:]
