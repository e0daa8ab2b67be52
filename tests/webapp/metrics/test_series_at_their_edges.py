"""The metric store under odd input: bounds, order, gaps, names, ranges, roll-ups by hypothesis."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.webapp.metrics.conftest import ATTEMPT, T0, append, points
from webapp.metrics import store
from webapp.metrics.models import MetricBatch, MetricChunk, MetricSource
from webapp.metrics.store import (
    GAP_PERIODS,
    STEPS_MS,
    Point,
    Range,
    RawSeries,
    bucket,
    read_raw,
    read_series,
    roll_up,
)

pytestmark = pytest.mark.django_db(databases="__all__")
MANY = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def clear() -> None:
    for model in (MetricBatch, MetricChunk, MetricSource):
        model.objects.all().delete()


def write(values, step_ms=1000, source="job", first=1) -> None:
    made = [
        Point(first + at, T0 + (first + at) * step_ms, source, {"loss": value})
        for at, value in enumerate(values)
    ]
    append(ATTEMPT, made)


def seal(*, is_rolled=False) -> None:
    store.seal(ATTEMPT, "job", through_seq=10**9)
    if is_rolled:
        roll_up(MetricSource.objects.get(), is_ended=True)


def loss(span=None, **more):
    return read_series(ATTEMPT, ["loss"], span, **more)[0]


def test_a_chart_gets_no_more_points_than_it_asked_for():
    for count in (1, 2, 599, 600, 601, 1500):
        clear()
        write([1.0] * count)
        for wanted in (1, 10, 600):
            assert len(loss(points=wanted).value) <= wanted, (count, wanted)


@MANY
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 50))
def test_thinning_keeps_the_lowest_and_the_highest(values, wanted):
    clear()
    write(values)
    series = loss(points=wanted)
    assert np.nanmin(series.low) == min(values)
    assert np.nanmax(series.high) == max(values)


@MANY
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 50))
def test_thinning_never_draws_a_mean_outside_its_band(values, wanted):
    clear()
    write(values)
    series = loss(points=wanted)
    known = ~np.isnan(series.value)
    assert (series.low[known] <= series.value[known] + 1e-6).all()
    assert (series.value[known] <= series.high[known] + 1e-6).all()


@MANY
@given(st.lists(st.integers(1, 60), min_size=2, max_size=40, unique=True))
def test_points_in_any_order_are_read_in_the_order_of_time(numbers):
    clear()
    for number in numbers:
        write([float(number)], first=number)
    series = loss()
    assert (np.diff(series.t_ms) > 0).all()
    assert [v for v in series.value if not math.isnan(v)] == sorted(map(float, numbers))


@MANY
@given(st.data())
def test_a_seal_anywhere_changes_nothing_that_is_read(data):
    clear()
    values = data.draw(st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=60))
    cut = data.draw(st.integers(1, len(values)))
    write(values[:cut])
    seal()
    write(values[cut:], first=cut + 1)
    assert read_raw(ATTEMPT, "job", "loss").value.tolist() == values


@MANY
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.sampled_from(STEPS_MS))
def test_buckets_lose_no_point_and_no_extreme(values, step_ms):
    n = len(values)
    series = RawSeries(np.arange(n), np.arange(n) * 700 + T0, np.array(values))
    band = bucket(series, step_ms)
    assert int(band.points.sum()) == n
    assert (band.low.min(), band.high.max()) == (min(values), max(values))
    assert (band.t_ms % step_ms == 0).all()


def test_a_range_cuts_journal_and_chunks_alike():
    write([float(n) for n in range(1, 11)])
    for is_sealed in (False, True):
        if is_sealed:
            seal()
        for since, until, numbers in (
            (T0 + 3000, T0 + 5000, [3, 4, 5]),
            (T0 + 3001, T0 + 4999, [4]),
            (0, T0 + 2000, [1, 2]),
            (T0 + 9000, 2**62, [9, 10]),
            (T0 + 60_000, 2**62, []),
            (T0 + 5000, T0 + 4000, []),
        ):
            found = read_raw(ATTEMPT, "job", "loss", Range(since, until))
            assert found.value.tolist() == numbers, (is_sealed, since, until)


def test_a_silence_is_a_gap_from_three_periods_on():
    for missing, gaps in [(1, 0), (GAP_PERIODS, 1), (30, 1)]:
        clear()
        write([1.0] * 20)
        write([1.0] * 20, first=21 + missing)
        assert int(np.isnan(loss().value).sum()) == gaps, missing


def test_a_gap_lies_between_its_neighbours_in_time():
    write([1.0] * 5)
    write([2.0] * 5, first=100)
    series = loss()
    (at,) = np.flatnonzero(np.isnan(series.value))
    assert series.t_ms[at - 1] < series.t_ms[at] < series.t_ms[at + 1]


def test_points_of_one_instant_make_no_gap():
    append(ATTEMPT, [Point(n, T0, "job", {"loss": float(n)}) for n in (1, 2, 3)])
    assert not np.isnan(loss().value).any()


def test_a_difficult_value_survives_journal_seal_and_roll_up():
    for value in [math.inf, -math.inf, math.nan, 1e308, -0.0, 5e-324]:
        clear()
        write([1.0, value, 2.0])
        seal(is_rolled=True)
        found = read_raw(ATTEMPT, "job", "loss").value[1]
        assert math.isnan(found) if math.isnan(value) else found == value, value


def test_a_metric_of_any_name_is_read_by_it():
    for name in ["größe", "a b", "x" * 60, "<b>", "loss/total", "0"]:
        clear()
        append(ATTEMPT, [Point(1, T0, "job", {name: 5.0})])
        seal()
        assert read_series(ATTEMPT, [name])[0].value.tolist() == [5.0], name


def test_a_metric_that_came_late_has_its_own_points_only():
    write([1.0] * 5)
    append(ATTEMPT, [Point(6, T0 + 6000, "job", {"loss": 1.0, "grad_norm": 2.0})])
    seal()
    assert len(read_raw(ATTEMPT, "job", "grad_norm").value) == 1
    assert len(read_raw(ATTEMPT, "job", "loss").value) == 6


def test_two_sources_may_have_a_metric_of_one_name():
    write([1.0], source="job")
    write([2.0], source="supervisor", first=2)
    found = {one.source: one.value.tolist() for one in read_series(ATTEMPT, ["loss"])}
    assert found == {"job": [1.0], "supervisor": [2.0]}


def test_an_empty_wish_reads_nothing_and_two_jobs_do_not_mix():
    write([1.0])
    assert read_series(ATTEMPT, []) == []
    append("01J" + "Z" * 23, points(1, 3))
    assert len(loss().value) == 1


def test_reading_a_long_job_asks_the_database_a_fixed_number_of_times(
    django_assert_max_num_queries,
):
    for part in range(10):
        write([1.0] * 100, first=1 + part * 100)
        seal()
    with django_assert_max_num_queries(6, using="metrics"):
        loss()


def test_a_day_of_seconds_is_read_from_few_rows():
    n = 86_400
    made = [Point(at, T0 + at * 1000, "job", {"loss": float(at % 7)}) for at in range(1, n, 10)]
    append(ATTEMPT, made)
    seal(is_rolled=True)
    series = loss(points=500)
    assert 250 <= len(series.value) <= 500
    assert (np.nanmin(series.low), np.nanmax(series.high)) == (0.0, 6.0)
