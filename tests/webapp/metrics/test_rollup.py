"""Roll-ups against a slow second way of computing them, and what stays when raw points go."""

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.webapp.conftest import EXIT_OK, batch_of
from tests.webapp.metrics.conftest import ATTEMPT, T0, append, points
from webapp.agents.ingest import events_accept
from webapp.metrics import store
from webapp.metrics.models import MetricBatch, MetricChunk, MetricSource
from webapp.metrics.store import (
    RAW_STEP_MS,
    STEPS_MS,
    WINDOW_MS,
    Point,
    Range,
    RawSeries,
    bucket,
    decode_band,
    prune_old,
    read_raw,
    read_series,
    roll_up,
)
from webapp.operations.ticker import seal_due

# Coarser levels say of every bucket what its points were.


pytestmark = pytest.mark.django_db(databases="__all__")


def sealed(first: int, count: int, step_ms: int = 1000) -> MetricSource:
    append(ATTEMPT, points(first, count, step_ms))
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
    append(ATTEMPT, points(1, 5))
    assert roll_up(MetricSource.objects.get(), is_ended=True) == 0


# Roll-ups against a slow second way of computing them, and what stays when raw points go.


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
    append(ATTEMPT, made)


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


def test_a_stored_roll_up_holds_each_point_once():
    write(WINDOW_START + HOUR, 1000)
    seal_and_roll()
    for step_ms in STEPS_MS:
        (band,) = rolled(step_ms)
        assert int(band.points.sum()) == 1000, step_ms
        assert (band.low.min(), band.high.max()) == (1.0, 1000.0), step_ms


def test_only_windows_that_are_over_are_rolled_up_and_cut_at_their_border():
    border = WINDOW_START + WINDOW_MS
    write(border - 10 * SECOND, 20)
    seal_and_roll(is_ended=False)
    assert [int(band.points.sum()) for band in rolled(15_000)] == [10]
    assert MetricSource.objects.get().rolled_through_ms == border
    seal_and_roll()
    before, after = rolled(15_000)
    assert (int(before.points.sum()), int(after.points.sum())) == (10, 10)
    assert before.t_ms.max() < border == after.t_ms.min()


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


def test_a_zoom_reads_only_what_lies_in_it_and_a_day_keeps_its_extremes_without_raw_points():
    write(WINDOW_START, 5760, step_ms=15 * SECOND)
    seal_and_roll()
    hour = Range(WINDOW_START + HOUR, WINDOW_START + 2 * HOUR)
    (series,) = read_series(ATTEMPT, ["loss"], hour)
    assert hour.since_ms <= series.t_ms.min()
    assert series.t_ms.max() <= hour.until_ms
    assert (np.nanmin(series.low), np.nanmax(series.high)) == (241.0, 481.0)
    store.prune_raw(before_ms=2**61)
    (series,) = read_series(ATTEMPT, ["loss"])
    assert (np.nanmin(series.low), np.nanmax(series.high)) == (1.0, 5760.0)


# A short run stays drawn once its raw points are pruned, wherever in a window it began.


def test_a_short_run_is_drawn_without_its_raw_points():
    for hours in (0, 1, 2.6, 3.9):
        start, attempt = WINDOW_START + int(hours * HOUR), f"after {hours} hours"
        made = [Point(n + 1, start + n * SECOND, "job", {"loss": float(n)}) for n in range(100)]
        append(attempt, made)
        store.seal(attempt, "job", through_seq=10**9)
        roll_up(MetricSource.objects.get(attempt_id=attempt), is_ended=True)
        MetricChunk.objects.filter(step_ms=RAW_STEP_MS).delete()
        (series,) = read_series(attempt, ["loss"], Range(start, start + HOUR))
        assert (min(series.low), max(series.high)) == (0.0, 99), hours


# The ticker's part: seal what is due, only as far as the main database acknowledged.


POINT = ("metric", {"source": "job", "values": {"loss": 2.5}})


def test_a_short_journal_waits_while_the_attempt_runs(attempt):
    events_accept(host=attempt.host, batch=batch_of(attempt, POINT))
    assert seal_due() == 0


def test_the_end_of_an_attempt_seals_and_rolls_up(attempt):
    events_accept(host=attempt.host, batch=batch_of(attempt, POINT, POINT, ("exited", EXIT_OK)))
    assert seal_due() == 2
    assert set(MetricChunk.objects.values_list("step_ms", flat=True)) == {0, 15_000, 300_000}


def test_what_is_not_acknowledged_is_not_sealed(attempt):
    events_accept(host=attempt.host, batch=batch_of(attempt, ("exited", EXIT_OK)))
    append(attempt.pk, [store.Point(2, 1, "job", {"loss": 1.0})])
    assert seal_due() == 0


def test_points_of_no_known_attempt_are_left_alone():
    append("nobody", [store.Point(1, 1, "job", {"loss": 1.0})])
    assert (seal_due(), MetricBatch.objects.count()) == (0, 1)


def test_raw_points_older_than_a_month_are_forgotten(attempt):
    events_accept(host=attempt.host, batch=batch_of(attempt, POINT, ("exited", EXIT_OK)))
    seal_due()
    assert prune_old() == 1
    assert not MetricChunk.objects.filter(step_ms=0).exists()
