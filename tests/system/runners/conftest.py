"""The fixtures of tests/runners, for tests with real processes."""

from tests.runners.conftest import (  # noqa: F401 -- fixtures
    acceptor,
    attempts,
    credential,
    host_dir,
    redis_server,
    small_disk,
    small_host_dir,
)
