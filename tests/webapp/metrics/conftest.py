"""Points of one source, one a second."""

import pytest

from webapp.metrics import store
from webapp.metrics.store import Delivery, Point

ATTEMPT = "01J0000000000000000000TEST"
T0 = 1_700_000_000_000


@pytest.fixture(autouse=True)
def _database(django_db_setup, db):
    """Every test here touches the metric store."""


def append(attempt_id: str, points: list[Point], *, acked_seq: int | None = None) -> list[str]:
    """Journal one attempt's points; return why some were left out."""
    return store.append([Delivery(attempt_id, points, acked_seq)]).get(attempt_id, [])


def points(first: int, count: int, step_ms: int = 1000, source: str = "job") -> list[Point]:
    return [
        Point(n, T0 + n * step_ms, source, {"loss": 1 / n, "rss_bytes": n * 4096.0})
        for n in range(first, first + count)
    ]
