"""What a chart gets: enough points and not more, extremes kept, gaps as gaps."""

import numpy as np
import pytest

from tests.webapp.metrics.conftest import ATTEMPT, T0, points
from webapp.metrics import store
from webapp.metrics.models import MetricSource
from webapp.metrics.read import Range, read_series
from webapp.metrics.rollup import roll_up

pytestmark = pytest.mark.django_db(databases="__all__")


def seal(*, is_rolled: bool = False) -> None:
    store.seal(ATTEMPT, "job", through_seq=10**9)
    if is_rolled:
        roll_up(MetricSource.objects.get(), is_ended=True)


def test_only_the_wanted_metrics_come():
    store.append(ATTEMPT, points(1, 5))
    assert [item.metric for item in read_series(ATTEMPT, ["loss", "unknown"])] == ["loss"]


def test_few_points_come_as_they_are():
    store.append(ATTEMPT, points(1, 5))
    series = read_series(ATTEMPT, ["loss"])[0]
    assert series.value.tolist() == [1 / n for n in range(1, 6)]
    assert series.t_ms.tolist() == [T0 + n * 1000 for n in range(1, 6)]


def test_journal_and_chunks_join_without_a_seam():
    store.append(ATTEMPT, points(1, 5))
    seal()
    store.append(ATTEMPT, points(6, 5))
    assert len(read_series(ATTEMPT, ["loss"])[0].value) == 10


def test_many_points_are_thinned_and_keep_their_extremes():
    store.append(ATTEMPT, points(1, 1000))
    series = read_series(ATTEMPT, ["loss"], points=50)[0]
    assert len(series.t_ms) <= 50
    assert (series.high.max(), series.low.min()) == (1.0, 1 / 1000)


def test_a_gap_of_three_periods_stays_a_gap():
    store.append(ATTEMPT, [*points(1, 10), *points(30, 10)])
    series = read_series(ATTEMPT, ["loss"])[0]
    assert np.isnan(series.value).sum() == 1
    assert T0 + 10_000 < series.t_ms[np.isnan(series.value)][0] < T0 + 30_000


def test_a_missed_point_is_no_gap():
    store.append(ATTEMPT, [*points(1, 10), *points(12, 10)])
    assert not np.isnan(read_series(ATTEMPT, ["loss"])[0].value).any()


def test_a_day_is_read_from_the_roll_ups():
    store.append(ATTEMPT, points(1, 4000, step_ms=20_000))
    seal(is_rolled=True)
    series = read_series(ATTEMPT, ["rss_bytes"], points=200)[0]
    assert len(series.t_ms) <= 201
    assert (series.high.max(), series.low.min()) == (4000 * 4096.0, 4096.0)


def test_roll_ups_and_what_came_after_them_join():
    store.append(ATTEMPT, points(1, 2000, step_ms=20_000))
    seal(is_rolled=True)
    store.append(ATTEMPT, points(2001, 20, step_ms=20_000))
    series = read_series(ATTEMPT, ["rss_bytes"], points=100)[0]
    assert series.high.max() == 2020 * 4096.0


def test_a_zoom_is_read_from_the_raw_points():
    store.append(ATTEMPT, points(1, 4000, step_ms=20_000))
    seal(is_rolled=True)
    span = Range(T0 + 20_000_000, T0 + 21_000_000)
    series = read_series(ATTEMPT, ["rss_bytes"], span, points=200)[0]
    assert series.t_ms.tolist() == list(range(T0 + 20_000_000, T0 + 21_000_001, 20_000))


def test_an_unknown_attempt_has_no_series():
    assert read_series("nobody", ["loss"]) == []


def test_sources_come_apart():
    store.append(ATTEMPT, [*points(1, 3), *points(4, 3, source="host")])
    assert [item.source for item in read_series(ATTEMPT, ["loss"])] == ["host", "job"]
