"""The metric store: its codec, journal and chunks, and how series are read."""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.webapp.metrics.conftest import ATTEMPT, T0, append, points
from webapp.metrics import store
from webapp.metrics.models import MetricBatch, MetricChunk, MetricSource
from webapp.metrics.store import Range, read_raw, read_series, roll_up

# The journal, sealing, and the chaos that both must survive.


pytestmark = pytest.mark.django_db(databases="__all__")
EVERYTHING = 10**9


def test_points_are_read_back_from_the_journal_once():
    append(ATTEMPT, [])
    assert not MetricSource.objects.exists()
    assert len(read_raw(ATTEMPT, "nobody", "loss").seq) == 0
    append(ATTEMPT, points(1, 3))
    series = read_raw(ATTEMPT, "job", "loss")
    assert series.value.tolist() == [1.0, 0.5, 1 / 3]
    for _ in range(2):
        append(ATTEMPT, points(1, 3))
    assert MetricBatch.objects.count() == 1


def test_each_source_has_its_own_journal():
    append(ATTEMPT, [*points(1, 2), *points(3, 2, source="host")])
    assert read_raw(ATTEMPT, "host", "loss").seq.tolist() == [3, 4]


def test_names_are_remembered_in_the_order_seen():
    append(ATTEMPT, points(1, 1))
    append(ATTEMPT, [store.Point(2, T0, "job", {"eta": 1.0, "loss": 2.0})])
    assert MetricSource.objects.get().metrics == ["loss", "rss_bytes", "eta"]


def test_what_did_not_commit_elsewhere_is_discarded_before_it_comes_again():
    append(ATTEMPT, points(1, 3), acked_seq=0)
    append(ATTEMPT, points(1, 5), acked_seq=0)
    assert read_raw(ATTEMPT, "job", "loss").seq.tolist() == [1, 2, 3, 4, 5]


def test_sealing_moves_the_journal_into_one_chunk_per_metric_once():
    append(ATTEMPT, points(1, 10))
    assert store.seal(ATTEMPT, "job", through_seq=EVERYTHING) == 10
    assert MetricBatch.objects.count() == 0
    assert MetricChunk.objects.count() == 2
    store.seal(ATTEMPT, "job", through_seq=EVERYTHING)
    assert store.seal(ATTEMPT, "job", through_seq=EVERYTHING) == 0


def test_sealing_changes_no_value():
    append(ATTEMPT, points(1, 10))
    before = read_raw(ATTEMPT, "job", "loss")
    store.seal(ATTEMPT, "job", through_seq=EVERYTHING)
    after = read_raw(ATTEMPT, "job", "loss")
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_only_what_is_acknowledged_is_sealed():
    append(ATTEMPT, points(1, 5))
    append(ATTEMPT, points(6, 5))
    assert store.seal(ATTEMPT, "job", through_seq=5) == 5


def test_late_points_get_a_generation_of_their_own():
    for _ in range(2):
        append(ATTEMPT, points(1, 3))
        store.seal(ATTEMPT, "job", through_seq=EVERYTHING)
    chunks = MetricChunk.objects.filter(metric="loss")
    assert sorted(chunks.values_list("gen", flat=True)) == [0, 1]
    assert read_raw(ATTEMPT, "job", "loss").seq.tolist() == [1, 2, 3]


def test_two_points_of_one_millisecond_both_stay():
    same = [store.Point(n, T0, "job", {"loss": float(n)}) for n in (1, 2)]
    append(ATTEMPT, same)
    store.seal(ATTEMPT, "job", through_seq=EVERYTHING)
    assert read_raw(ATTEMPT, "job", "loss").value.tolist() == [1.0, 2.0]


def test_a_journal_is_due_when_it_is_long_old_or_over():
    for count, step_ms, is_ended, is_due in (
        (0, 1000, True, False),
        (10, 1000, False, False),
        (10, 1000, True, True),
        (600, 10, False, True),
        (7, 10**5, False, True),
    ):
        attempt = f"{count} every {step_ms}, {is_ended}"
        append(attempt, points(1, count, step_ms))
        assert store.needs_seal(attempt, "job", is_ended=is_ended) == is_due, attempt


def test_pruning_forgets_old_raw_chunks_only():
    append(ATTEMPT, points(1, 5))
    store.seal(ATTEMPT, "job", through_seq=EVERYTHING)
    append(ATTEMPT, points(100, 5))
    store.seal(ATTEMPT, "job", through_seq=EVERYTHING)
    assert store.prune_raw(before_ms=T0 + 50_000) == 2
    assert read_raw(ATTEMPT, "job", "loss").seq.tolist() == [100, 101, 102, 103, 104]


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32))
def test_chaos_leaves_the_series_bit_identical(seed):
    """Batches come twice and late, and are sealed meanwhile; what is read is what was sent."""
    chance = random.Random(seed)  # noqa: S311 (a test, not a secret)
    attempt = f"chaos-{seed}"[:26]
    MetricBatch.objects.filter(attempt_id=attempt).delete()
    MetricChunk.objects.filter(attempt_id=attempt).delete()
    batches = [points(first, 5) for first in range(1, 301, 5)]
    deliveries = [
        (index + chance.expovariate(1 / 8), batch) for index, batch in enumerate(batches)
    ]
    deliveries += [(index + 20 * chance.random(), batches[index]) for index in range(0, 60, 4)]
    for count, (_, batch) in enumerate(sorted(deliveries, key=lambda item: item[0])):
        append(attempt, batch)
        if count % 12 == 11:
            store.seal(attempt, "job", through_seq=EVERYTHING)
    got = read_raw(attempt, "job", "loss")
    sent = [point for batch in batches for point in batch]
    assert got.seq.tolist() == [point.seq for point in sent]
    assert got.t_ms.tolist() == [point.t_ms for point in sent]
    assert got.value.tolist() == [point.values["loss"] for point in sent]


# Columns come back bit for bit, and small.


INT64 = st.integers(-(2**63), 2**63 - 1)
ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True, width=64)


def bits(column: np.ndarray) -> list[int]:
    return column.view(np.uint64).tolist()


@given(st.lists(st.tuples(INT64, ANY_FLOAT), max_size=200))
def test_any_columns_come_back_bit_for_bit(rows):
    integers = np.array([row[0] for row in rows], np.int64)
    floats = np.array([row[1] for row in rows], np.float64)
    decoded = store.decode(store.encode([integers, floats]))
    assert bits(decoded[0]) == bits(integers)
    assert bits(decoded[1]) == bits(floats)


@given(st.lists(st.integers(-(10**9), 10**9), min_size=1), st.integers(0, 3))
def test_decimals_come_back_bit_for_bit(numbers, decimals):
    floats = np.array([number / 10**decimals for number in numbers])
    assert bits(store.decode(store.encode([floats]))[0]) == bits(floats)


def test_a_difficult_number_or_payload_comes_back_bit_for_bit():
    for value in [-0.0, float("nan"), float("inf"), 5e-324, 1e308, 0.1, 1 / 3]:
        column = np.array([value, 1.5, value])
        assert bits(store.decode(store.encode([column]))[0]) == bits(column), value
    column = np.array([0x7FF8_0000_0000_BEEF], np.uint64).view(np.float64)
    assert bits(store.decode(store.encode([column]))[0]) == bits(column)


def test_jittered_times_and_utilisation_cost_about_one_byte_each():
    jitter = np.random.default_rng(1).integers(-3, 4, 600)
    times = 1_700_000_000_000 + np.arange(600) * 1000 + jitter
    assert len(store.encode([times])) < 600 * 1.2
    percent = np.random.default_rng(1).integers(90, 100, 600).astype(np.float64)
    assert len(store.encode([percent])) < 600


def test_columns_of_different_lengths_and_unknown_codecs_are_refused():
    with pytest.raises(ValueError, match="one length"):
        store.encode([np.zeros(2), np.zeros(3)])
    for blob in [b"", b"\x63abc"]:
        with pytest.raises(ValueError, match="unknown metric codec"):
            store.decode(blob)


# What a chart gets: enough points and not more, extremes kept, gaps as gaps.


def seal(*, is_rolled: bool = False) -> None:
    store.seal(ATTEMPT, "job", through_seq=10**9)
    if is_rolled:
        roll_up(MetricSource.objects.get(), is_ended=True)


def test_few_points_of_the_wanted_metrics_come_as_they_are_from_journal_and_chunks():
    append(ATTEMPT, points(1, 5))
    assert [item.metric for item in read_series(ATTEMPT, ["loss", "unknown"])] == ["loss"]
    series = read_series(ATTEMPT, ["loss"])[0]
    assert series.value.tolist() == [1 / n for n in range(1, 6)]
    assert series.t_ms.tolist() == [T0 + n * 1000 for n in range(1, 6)]
    seal()
    append(ATTEMPT, points(6, 5))
    assert len(read_series(ATTEMPT, ["loss"])[0].value) == 10
    assert read_series("nobody", ["loss"]) == []


def test_a_day_is_read_from_the_roll_ups_and_a_zoom_from_the_raw_points():
    append(ATTEMPT, points(1, 4000, step_ms=20_000))
    seal(is_rolled=True)
    series = read_series(ATTEMPT, ["rss_bytes"], points=200)[0]
    assert len(series.t_ms) <= 201
    assert (series.high.max(), series.low.min()) == (4000 * 4096.0, 4096.0)
    span = Range(T0 + 20_000_000, T0 + 21_000_000)
    series = read_series(ATTEMPT, ["rss_bytes"], span, points=200)[0]
    assert series.t_ms.tolist() == list(range(T0 + 20_000_000, T0 + 21_000_001, 20_000))


def test_roll_ups_and_what_came_after_them_join():
    append(ATTEMPT, points(1, 2000, step_ms=20_000))
    seal(is_rolled=True)
    append(ATTEMPT, points(2001, 20, step_ms=20_000))
    series = read_series(ATTEMPT, ["rss_bytes"], points=100)[0]
    assert series.high.max() == 2020 * 4096.0


def test_sources_come_apart():
    append(ATTEMPT, [*points(1, 3), *points(4, 3, source="host")])
    assert [item.source for item in read_series(ATTEMPT, ["loss"])] == ["host", "job"]
