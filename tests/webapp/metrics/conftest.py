"""Points of one source, one a second."""

import pytest

from webapp.metrics.store import Point

ATTEMPT = "01J0000000000000000000TEST"
T0 = 1_700_000_000_000


@pytest.fixture(autouse=True)
def _database(django_db_setup, db):
    """Every test here touches the metric store."""


def points(first: int, count: int, step_ms: int = 1000, source: str = "job") -> list[Point]:
    return [
        Point(n, T0 + n * step_ms, source, {"loss": 1 / n, "rss_bytes": n * 4096.0})
        for n in range(first, first + count)
    ]
