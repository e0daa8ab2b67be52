"""The journal, sealing, and the chaos that both must survive."""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.webapp.metrics.conftest import ATTEMPT, T0, points
from webapp.metrics import store
from webapp.metrics.models import MetricBatch, MetricChunk, MetricSource
from webapp.metrics.read import Range, read_raw

pytestmark = pytest.mark.django_db(databases="__all__")
EVERYTHING = 10**9


def test_points_are_read_back_from_the_journal():
    store.append(ATTEMPT, points(1, 3))
    series = read_raw(ATTEMPT, "job", "loss")
    assert series.value.tolist() == [1.0, 0.5, 1 / 3]


def test_no_points_make_no_row():
    store.append(ATTEMPT, [])
    assert not MetricSource.objects.exists()


def test_a_redelivered_batch_changes_nothing():
    for _ in range(2):
        store.append(ATTEMPT, points(1, 3))
    assert MetricBatch.objects.count() == 1


def test_each_source_has_its_own_journal():
    store.append(ATTEMPT, [*points(1, 2), *points(3, 2, source="host")])
    assert read_raw(ATTEMPT, "host", "loss").seq.tolist() == [3, 4]


def test_names_are_remembered_in_the_order_seen():
    store.append(ATTEMPT, points(1, 1))
    store.append(ATTEMPT, [store.Point(2, T0, "job", {"eta": 1.0, "loss": 2.0})])
    assert MetricSource.objects.get().metrics == ["loss", "rss_bytes", "eta"]


def test_what_did_not_commit_elsewhere_is_discarded_before_it_comes_again():
    store.append(ATTEMPT, points(1, 3), acked_seq=0)
    store.append(ATTEMPT, points(1, 5), acked_seq=0)
    assert read_raw(ATTEMPT, "job", "loss").seq.tolist() == [1, 2, 3, 4, 5]


def test_sealing_moves_the_journal_into_one_chunk_per_metric():
    store.append(ATTEMPT, points(1, 10))
    assert store.seal(ATTEMPT, "job", through_seq=EVERYTHING) == 10
    assert MetricBatch.objects.count() == 0
    assert MetricChunk.objects.count() == 2


def test_sealing_changes_no_value():
    store.append(ATTEMPT, points(1, 10))
    before = read_raw(ATTEMPT, "job", "loss")
    store.seal(ATTEMPT, "job", through_seq=EVERYTHING)
    after = read_raw(ATTEMPT, "job", "loss")
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_sealing_twice_finds_nothing():
    store.append(ATTEMPT, points(1, 10))
    store.seal(ATTEMPT, "job", through_seq=EVERYTHING)
    assert store.seal(ATTEMPT, "job", through_seq=EVERYTHING) == 0


def test_only_what_is_acknowledged_is_sealed():
    store.append(ATTEMPT, points(1, 5))
    store.append(ATTEMPT, points(6, 5))
    assert store.seal(ATTEMPT, "job", through_seq=5) == 5


def test_late_points_get_a_generation_of_their_own():
    for _ in range(2):
        store.append(ATTEMPT, points(1, 3))
        store.seal(ATTEMPT, "job", through_seq=EVERYTHING)
    assert sorted(MetricChunk.objects.filter(metric="loss").values_list("gen", flat=True)) == [
        0,
        1,
    ]
    assert read_raw(ATTEMPT, "job", "loss").seq.tolist() == [1, 2, 3]


def test_two_points_of_one_millisecond_both_stay():
    same = [store.Point(n, T0, "job", {"loss": float(n)}) for n in (1, 2)]
    store.append(ATTEMPT, same)
    store.seal(ATTEMPT, "job", through_seq=EVERYTHING)
    assert read_raw(ATTEMPT, "job", "loss").value.tolist() == [1.0, 2.0]


def test_a_loss_that_diverged_stays_nan():
    store.append(ATTEMPT, [store.Point(1, T0, "job", {"loss": float("nan")})])
    store.seal(ATTEMPT, "job", through_seq=EVERYTHING)
    assert np.isnan(read_raw(ATTEMPT, "job", "loss").value).tolist() == [True]


def test_a_range_takes_both_its_ends():
    store.append(ATTEMPT, points(1, 10))
    span = Range(T0 + 3000, T0 + 5000)
    assert read_raw(ATTEMPT, "job", "loss", span).seq.tolist() == [3, 4, 5]


def test_an_unknown_source_reads_as_nothing():
    assert len(read_raw(ATTEMPT, "nobody", "loss").seq) == 0


@pytest.mark.parametrize(
    ("count", "step_ms", "is_ended", "is_due"),
    [
        (10, 1000, False, False),
        (10, 1000, True, True),
        (600, 10, False, True),
        (7, 10**5, False, True),
    ],
)
def test_a_journal_is_due_when_it_is_long_old_or_over(count, step_ms, is_ended, is_due):
    store.append(ATTEMPT, points(1, count, step_ms))
    assert store.needs_seal(ATTEMPT, "job", is_ended=is_ended) == is_due


def test_an_empty_journal_is_never_due():
    assert not store.needs_seal(ATTEMPT, "job", is_ended=True)


def test_pruning_forgets_old_raw_chunks_only():
    store.append(ATTEMPT, points(1, 5))
    store.seal(ATTEMPT, "job", through_seq=EVERYTHING)
    store.append(ATTEMPT, points(100, 5))
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
        store.append(attempt, batch)
        if count % 12 == 11:
            store.seal(attempt, "job", through_seq=EVERYTHING)
    got = read_raw(attempt, "job", "loss")
    sent = [point for batch in batches for point in batch]
    assert got.seq.tolist() == [point.seq for point in sent]
    assert got.t_ms.tolist() == [point.t_ms for point in sent]
    assert got.value.tolist() == [point.values["loss"] for point in sent]
