"""Coarser levels say of every bucket what its points were."""

import numpy as np
import pytest

from tests.webapp.metrics.conftest import ATTEMPT, T0, points
from webapp.metrics import store
from webapp.metrics.models import MetricChunk, MetricSource
from webapp.metrics.rollup import WINDOW_MS, bucket, decode_band, roll_up

pytestmark = pytest.mark.django_db(databases="__all__")


def sealed(first: int, count: int, step_ms: int = 1000) -> MetricSource:
    store.append(ATTEMPT, points(first, count, step_ms))
    store.seal(ATTEMPT, "job", through_seq=10**9)
    return MetricSource.objects.get()


def bands(step_ms: int, metric: str = "loss") -> list:
    chunks = MetricChunk.objects.filter(step_ms=step_ms, metric=metric).order_by("t0_ms")
    return [decode_band(chunk) for chunk in chunks]


def test_a_bucket_holds_minimum_maximum_mean_and_count():
    series = store.gather(
        store.Point(n, n * 5000, "job", {"x": value})
        for n, value in enumerate([1.0, 9.0, 5.0, 7.0])
    )["x"]
    band = bucket(series, 15_000)
    assert band.t_ms.tolist() == [0, 15_000]
    assert (band.low[0], band.high[0], band.mean[0], band.points[0]) == (1.0, 9.0, 5.0, 3)


def test_the_mean_of_values_near_the_largest_float_is_one_of_them():
    values = {0: 1.7e308, 1: 1.7e308, 1000: 1.0, 2000: -1.7e308, 2001: -1.7e308}
    series = store.gather(
        store.Point(n, t_ms, "job", {"x": value}) for n, (t_ms, value) in enumerate(values.items())
    )["x"]
    band = bucket(series, 1000)

    assert band.mean.tolist() == pytest.approx([1.7e308, 1.0, -1.7e308])


def test_an_unfinished_window_waits():
    assert roll_up(sealed(1, 100), is_ended=False) == 0


def test_at_the_end_the_rest_is_rolled_up():
    assert roll_up(sealed(1, 100), is_ended=True) == 4  # two metrics, two levels
    assert sum(int(band.points.sum()) for band in bands(15_000)) == 100


def test_a_whole_window_is_rolled_up_while_the_job_runs():
    roll_up(sealed(1, 1000, step_ms=20_000), is_ended=False)
    assert 0 < sum(int(band.points.sum()) for band in bands(300_000)) < 1000


def test_rolling_up_again_writes_nothing():
    source = sealed(1, 100)
    roll_up(source, is_ended=True)
    source.refresh_from_db()
    assert roll_up(source, is_ended=True) == 0


def test_late_points_make_their_window_again():
    roll_up(sealed(1, 100), is_ended=True)
    roll_up(sealed(101, 50), is_ended=True)
    assert sum(int(band.points.sum()) for band in bands(15_000)) == 150


def test_the_levels_agree_with_each_other():
    roll_up(sealed(1, 2000), is_ended=True)
    fine, coarse = (bands(step)[0] for step in (15_000, 300_000))
    assert coarse.low.min() == fine.low.min()
    assert np.isclose((coarse.mean * coarse.points).sum(), (fine.mean * fine.points).sum())


def test_a_long_series_gets_a_row_per_window():
    roll_up(sealed(1, 2000, step_ms=20_000), is_ended=True)
    windows = {t // WINDOW_MS for t in range(T0 + 20_000, T0 + 40_020_000, 20_000)}
    assert len(bands(15_000)) == len(windows)


def test_a_source_without_chunks_has_nothing_to_roll_up():
    store.append(ATTEMPT, points(1, 5))
    assert roll_up(MetricSource.objects.get(), is_ended=True) == 0
