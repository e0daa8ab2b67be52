"""A short run stays drawn once its raw points are pruned, wherever in a window it began."""

import pytest

from tests.webapp.metrics.conftest import ATTEMPT
from webapp.metrics import store
from webapp.metrics.models import MetricChunk, MetricSource
from webapp.metrics.read import Range, read_series
from webapp.metrics.rollup import RAW_STEP_MS, WINDOW_MS, roll_up
from webapp.metrics.store import Point

pytestmark = pytest.mark.django_db(databases="__all__")
WINDOW_START = 118_000 * WINDOW_MS
HOUR_MS, SECOND_MS, NUM_POINTS = 3_600_000, 1000, 100


@pytest.mark.parametrize("hours", [0, 1, 2.6, 3.9])
def test_a_short_run_is_drawn_without_its_raw_points(hours):
    start = WINDOW_START + int(hours * HOUR_MS)
    points = [
        Point(n + 1, start + n * SECOND_MS, "job", {"loss": float(n)}) for n in range(NUM_POINTS)
    ]
    store.append(ATTEMPT, points)
    store.seal(ATTEMPT, "job", through_seq=10**9)
    roll_up(MetricSource.objects.get(), is_ended=True)
    MetricChunk.objects.filter(step_ms=RAW_STEP_MS).delete()

    (series,) = read_series(ATTEMPT, ["loss"], Range(start, start + HOUR_MS))

    assert min(series.low) == 0.0
    assert max(series.high) == NUM_POINTS - 1
