"""The bench of pages: its site is what it says, and every page of it answers."""

import pytest

from webapp.core.benches import long_history
from webapp.core.benches.long_history import figures
from webapp.hosts.models import Host
from webapp.jobs.models import Job, Measurement

pytestmark = pytest.mark.django_db(databases=["default", "metrics"])


def test_the_site_has_as_many_jobs_as_were_asked_for_and_each_page_is_timed(monkeypatch):
    monkeypatch.setattr(long_history, "HOSTS", 9)
    monkeypatch.setattr(long_history, "PLANS", 3)
    monkeypatch.setattr(long_history, "ROUNDS", 1)

    waiting = long_history.fill(20, num_waiting=4)
    seconds = long_history.seconds_of(waiting)

    assert Job.objects.exclude(state="queued").count() == 20
    assert Job.objects.filter(state="queued").count() == 4
    assert Host.objects.count() == 9
    assert Measurement.objects.count() == 20
    assert list(seconds) == long_history.names()
    assert all(value > 0 for value in seconds.values())


def test_growth_is_told_between_the_smallest_and_the_largest_site(monkeypatch, tmp_path):
    taken = {10: 0.1, 1000: 0.4}
    monkeypatch.setattr(
        "webapp.core.benches.long_history._measured",
        lambda _data, size: dict.fromkeys(long_history.names(), taken[size]),
    )

    told = {name: value for name, value, _ in figures(tmp_path, [10, 1000])}

    assert told["home, 10 jobs"] == 0.1
    assert told["home: exponent of growth"] == pytest.approx(0.301, abs=1e-3)
