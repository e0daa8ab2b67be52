"""The ticker's part: seal what is due, only as far as the main database acknowledged."""

import pytest

from tests.webapp.conftest import EXIT_OK, batch_of
from webapp.jobs.ingest import events_accept
from webapp.metrics import store
from webapp.metrics.models import MetricBatch, MetricChunk
from webapp.metrics.rollup import prune_old, seal_due

pytestmark = pytest.mark.django_db(databases="__all__")
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
    store.append(attempt.pk, [store.Point(2, 1, "job", {"loss": 1.0})])
    assert seal_due() == 0


def test_points_of_no_known_attempt_are_left_alone():
    store.append("nobody", [store.Point(1, 1, "job", {"loss": 1.0})])
    assert (seal_due(), MetricBatch.objects.count()) == (0, 1)


def test_raw_points_older_than_a_month_are_forgotten(attempt):
    events_accept(host=attempt.host, batch=batch_of(attempt, POINT, ("exited", EXIT_OK)))
    seal_due()
    assert prune_old() == 1
    assert not MetricChunk.objects.filter(step_ms=0).exists()
