"""The people, host, jobs and Redis of tests/webapp, for tests with real processes."""

from tests.webapp.conftest import (  # noqa: F401 -- fixtures
    _cheap_passwords,
    _no_calls_before,
    _shared_answers,
    alice,
    attempt,
    bob,
    charlie,
    credential,
    draft,
    enrolled,
    host,
    job,
    olga,
    other_host,
    other_team,
    redis_client,
    redis_server,
    team,
    things,
    vera,
)
from tests.webapp.hosts.conftest import closed_redis  # noqa: F401 -- a fixture
from tests.webapp.jobs_pages.conftest import as_alice  # noqa: F401 -- a fixture
from tests.webapp.queue.conftest import node_a, node_b, submit  # noqa: F401 -- fixtures
