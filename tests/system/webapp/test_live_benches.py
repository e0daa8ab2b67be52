"""The benches of the live path run, on a site that they fill themselves."""

import json
import math
import re

import pytest
from django.db import connection

from runners.host.redis_access import decode, encode
from tests.webapp.conftest import EXIT_OK, STARTED, batch_of
from webapp.agents.ingest import events_accept, is_routine
from webapp.bench import first_line, live_ends, live_path, screen, site, supervising
from webapp.jobs.job_charts import draw
from webapp.jobs.models import Attempt, Job
from webapp.live.stream import read_ticket

DATABASE = pytest.mark.django_db(databases="__all__")


@DATABASE
def test_the_site_has_running_jobs_that_somebody_watches(capsys):
    live_path.fill(5, jobs_per_viewer=2)
    live_path.fill(1, jobs_per_viewer=1)  # once more: it adds to what is there
    made = json.loads(capsys.readouterr().out.splitlines()[0])

    topics = [read_ticket(ticket)[1] for ticket in made["tickets"]]
    assert [len(each) for each in topics] == [2, 2, 1]
    assert Job.objects.filter(state="running", current_attempt__isnull=False).count() == 6
    for host_id, attempt_id in made["attempts"]:
        attempt = Attempt.objects.get(pk=attempt_id, host=host_id)
        num_gpus, more = (8, 2) if host_id == made["attempts"][-1][0] else (0, 0)
        batch = decode(encode(live_ends.batch_of(attempt_id, 0, num_gpus, age_seconds=300)))
        assert is_routine(batch)
        assert events_accept(host=attempt.host, batch=batch).acked_seq == live_ends.EVENTS + more
    drawn = draw(attempt.job, is_complete=True)
    assert len([each for each in drawn if each.line.known]) >= screen.LEAST_CHARTS


@DATABASE
def test_every_milestone_of_the_demo_is_found(attempt):
    events = [
        ("started", STARTED), ("phase", {"name": "Loading libraries"}),
        ("log", {"stream": "supervisor", "text": "it starts"}), ("phase", {"name": "Training"}),
        ("exited", EXIT_OK),
    ]  # fmt: skip
    events_accept(host=attempt.host, batch=batch_of(attempt, *events))
    with connection.cursor() as cursor:
        for query in [*first_line.MILESTONES.values(), first_line.ENDED]:
            cursor.execute(query.replace("?", "%s"), [attempt.job_id])
            assert cursor.fetchone()[0]


@pytest.mark.soak  # minutes of a browser
@pytest.mark.slow
@pytest.mark.browser
def test_the_bench_of_the_screen_measures_every_page_and_interaction(tmp_path, monkeypatch):
    monkeypatch.setattr(screen, "REPEATS", 1)
    rows = list(screen.screen_metrics(tmp_path))
    assert len({name for name, *_ in rows}) == len(rows) == 2 * len(screen.LIGHT) + 11
    assert all(math.isfinite(value) for _, value, *_ in rows)
    weights = {name: value for name, value, unit, _ in rows if unit == "kB"}
    assert all(0 < value <= screen.GOAL_KB for value in weights.values()), weights


@pytest.mark.soak  # ten seconds of a crowd: on a busy machine its watcher did not answer in a minute
@pytest.mark.slow
def test_the_benches_give_their_figures_on_a_running_site(tmp_path):
    with site.running(tmp_path, OMP_NUM_THREADS="1") as up:
        live = {name: value for name, value, *_ in live_path.load_rows(up, 4, 7.0, 3.0)}
        host = {name: value for name, value, *_ in supervising.supervision_rows(up, 7.0, 3.0)}

    assert live["host to browser, median"] > 0
    assert live["events with an instant that browsers saw"] > 0
    assert all(value > 0 for name, value in live.items() if re.search("process", name))
    assert all(value > 0 for value in host.values())
