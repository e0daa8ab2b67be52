"""Roll-ups against a slow second way of computing them, and what stays when raw points go."""

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.webapp.metrics.conftest import ATTEMPT
from webapp.metrics import store
from webapp.metrics.models import MetricChunk, MetricSource
from webapp.metrics.read import Range, read_raw, read_series
from webapp.metrics.rollup import STEPS_MS, WINDOW_MS, bucket, decode_band, roll_up
from webapp.metrics.store import Point, RawSeries

pytestmark = pytest.mark.django_db(databases="__all__")
WINDOW_START = 118_000 * WINDOW_MS  # a day in 2023
SECOND, HOUR = 1000, 3_600_000
VALUES = st.floats(-1e6, 1e6).map(lambda value: round(value, 3))
POINTS = st.lists(st.tuples(st.integers(0, 10**6), VALUES), min_size=1, max_size=80)


def by_hand(points: list[tuple[int, float]], step_ms: int) -> dict[int, tuple]:
    """Bucket start -> lowest, highest, number and mean of its values, one point at a time."""
    found: dict[int, list[float]] = defaultdict(list)
    for t_ms, value in points:
        found[t_ms - t_ms % step_ms].append(value)
    return {
        start: (min(some), max(some), len(some), math.fsum(some) / len(some))
        for start, some in found.items()
    }


def raw(points: list[tuple[int, float]]) -> RawSeries:
    times, values = zip(*points, strict=True)
    return RawSeries(np.arange(len(points)), np.array(times), np.array(values))


def write(start_ms: int, count: int, step_ms: int = SECOND, first: int = 1) -> None:
    """Points whose loss is their number."""
    made = [
        Point(first + n, start_ms + n * step_ms, "job", {"loss": float(first + n)})
        for n in range(count)
    ]
    store.append(ATTEMPT, made)


def seal_and_roll(*, is_ended: bool = True) -> None:
    store.seal(ATTEMPT, "job", through_seq=10**9)
    roll_up(MetricSource.objects.get(), is_ended=is_ended)


def rolled(step_ms: int) -> list:
    chunks = MetricChunk.objects.filter(step_ms=step_ms).order_by("t0_ms")
    return [decode_band(chunk) for chunk in chunks]


@settings(deadline=None)
@given(POINTS, st.sampled_from(STEPS_MS))
def test_every_bucket_is_what_counting_by_hand_gives(points, step_ms):
    band = bucket(raw(points), step_ms)
    expected = by_hand(points, step_ms)

    assert band.t_ms.tolist() == sorted(expected)
    for at, start in enumerate(band.t_ms.tolist()):
        low, high, count, mean = expected[start]
        assert (band.low[at], band.high[at], band.points[at]) == (low, high, count)
        assert band.mean[at] == pytest.approx(mean, rel=1e-9, abs=1e-6)


@settings(deadline=None)
@given(POINTS, st.randoms(use_true_random=False))
def test_a_bucket_does_not_depend_on_the_order_of_its_points(points, random):
    shuffled = list(points)
    random.shuffle(shuffled)

    one, other = bucket(raw(points), 15_000), bucket(raw(shuffled), 15_000)

    assert one.t_ms.tolist() == other.t_ms.tolist()
    assert one.low.tolist() == other.low.tolist()
    assert one.high.tolist() == other.high.tolist()


def test_a_point_on_the_border_of_two_buckets_belongs_to_the_later_one():
    band = bucket(raw([(14_999, 1.0), (15_000, 2.0)]), 15_000)

    assert band.t_ms.tolist() == [0, 15_000]
    assert band.points.tolist() == [1, 1]


@pytest.mark.parametrize("step_ms", STEPS_MS)
def test_a_stored_roll_up_holds_each_point_once(step_ms):
    write(WINDOW_START + HOUR, 1000)
    seal_and_roll()

    (band,) = rolled(step_ms)

    assert int(band.points.sum()) == 1000
    assert (band.low.min(), band.high.max()) == (1.0, 1000.0)


def test_a_series_over_the_border_of_a_window_is_cut_there_and_nowhere_else():
    border = WINDOW_START + WINDOW_MS
    write(border - 10 * SECOND, 20)
    seal_and_roll()

    before, after = rolled(15_000)

    assert (int(before.points.sum()), int(after.points.sum())) == (10, 10)
    assert before.t_ms.max() < border == after.t_ms.min()


def test_while_a_job_runs_only_windows_that_are_over_are_rolled_up():
    border = WINDOW_START + WINDOW_MS
    write(border - 10 * SECOND, 20)
    seal_and_roll(is_ended=False)

    assert [int(band.points.sum()) for band in rolled(15_000)] == [10]
    assert MetricSource.objects.get().rolled_through_ms == border


def test_the_raw_points_of_one_instant_stay_while_it_is_not_older_than_asked():
    write(WINDOW_START, 10)
    seal_and_roll()
    last = WINDOW_START + 9 * SECOND

    kept = store.prune_raw(before_ms=last)
    gone = store.prune_raw(before_ms=last + 1)

    assert (kept, gone) == (0, 1)


def test_forgetting_raw_points_leaves_the_roll_ups_as_they_were():
    write(WINDOW_START, 100)
    seal_and_roll()
    before = [band.mean.tolist() for step in STEPS_MS for band in rolled(step)]

    store.prune_raw(before_ms=2**61)

    assert read_raw(ATTEMPT, "job", "loss").value.tolist() == []
    assert [band.mean.tolist() for step in STEPS_MS for band in rolled(step)] == before


def test_a_day_whose_raw_points_are_gone_is_still_drawn_with_its_extremes():
    write(WINDOW_START, 5760, step_ms=15 * SECOND)
    seal_and_roll()
    store.prune_raw(before_ms=2**61)

    (series,) = read_series(ATTEMPT, ["loss"])

    assert (np.nanmin(series.low), np.nanmax(series.high)) == (1.0, 5760.0)


def test_a_zoom_reads_only_what_lies_in_it():
    write(WINDOW_START, 5760, step_ms=15 * SECOND)
    seal_and_roll()
    hour = Range(WINDOW_START + HOUR, WINDOW_START + 2 * HOUR)

    (series,) = read_series(ATTEMPT, ["loss"], hour)

    assert hour.since_ms <= series.t_ms.min()
    assert series.t_ms.max() <= hour.until_ms
    assert (np.nanmin(series.low), np.nanmax(series.high)) == (241.0, 481.0)
