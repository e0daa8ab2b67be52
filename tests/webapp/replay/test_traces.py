"""Traces: the published shapes, files, a pool's history; and the command that replays them."""

import json
from datetime import timedelta
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from django.core.management import CommandError, call_command

from tests.webapp.conftest import make_job
from tests.webapp.queue.conftest import gpu_host
from webapp.core.clock import now
from webapp.hosts.models import Pool
from webapp.jobs.models import Job
from webapp.replay.figures import Waits, figures_of, jain
from webapp.replay.fleet import Shape
from webapp.replay.replaying import POLICIES, replay
from webapp.replay.traces import even_fleet, published, read, shape_of, shaped


def test_a_shape_has_the_figures_that_its_authors_publish():
    shape = published()["helios"]
    trace = shaped("helios", 400_000, 8_000, load=0.5)
    seconds = np.array(trace.seconds)
    devices = np.array([each.num_devices for each in trace.shapes])
    told = shape["published"]
    assert np.median(seconds) == pytest.approx(told["median_seconds"], rel=0.05)
    assert seconds.mean() == pytest.approx(told["mean_seconds"], rel=0.1)  # read between points
    assert devices.mean() == pytest.approx(told["mean_devices"], rel=0.02)
    time = devices * seconds
    for size, percent in zip(shape["devices"], shape["device_time_percent"], strict=True):
        found = 100 * time[devices <= size].sum() / time.sum()
        assert found == pytest.approx(percent, abs=2.5), size
    assert time.sum() / 8_000 / trace.submitted[-1] == pytest.approx(0.5, rel=0.01)


def test_every_shape_is_a_distribution_with_a_source():
    for name, shape in published().items():
        for values, percents in (("seconds", "seconds_percent"), ("devices", "jobs_percent")):
            told, upto = shape[values], shape[percents]
            assert len(told) == len(upto), (name, values)
            assert (told, upto) == (sorted(told), sorted(upto)), (name, values)
            assert upto[-1] == 100, (name, values)
        assert len(shape["length_shift"]) == len(shape["devices"]), name
        assert "arXiv" in shape["source"], name


def test_fewer_hosts_wait_longer_and_a_policy_moves_waits_between_jobs():
    trace = shaped("helios", 800, 10 * 8, load=1.6, seed=3)
    found = {
        (policy, hosts): figures_of(
            trace, fleet, replay(trace, fleet, policy, interval=60, turns=30)
        )
        for policy, hosts in [*((policy, 10) for policy in POLICIES), ("fair-share", 8)]
        for fleet in [even_fleet(hosts, 8)]
    }
    fair, fewer = found["fair-share", 10], found["fair-share", 8]
    assert fair.waits.mean < fewer.waits.mean
    assert found["short-first", 10].waits.p90 <= fair.waits.p90
    assert found["no-forecasts", 10].waits.mean > fair.waits.mean
    assert found["no-forecasts", 10].use < fair.use
    for figures in found.values():
        assert 0 < figures.fairness <= 1
        assert figures.waits.num_jobs + figures.num_impossible == 800


def test_use_and_waits_are_those_of_a_queue_that_one_can_count():
    trace = shaped("philly", 3, 8)
    told = {"submitted": [0.0, 10.0, 40.0], "seconds": [30.0, 30.0, 30.0], "teams": [0, 0, 1]}
    shapes = {"shapes": [Shape(1, 1, (0,))] * 3, "lengths": [30.0] * 3, "priorities": [0] * 3}
    names = {"team_names": ["a", "b"], "weights": [1.0, 1.0]}
    trace, fleet = type(trace)(**told, **shapes, **names), even_fleet(1, 1)
    figures = figures_of(trace, fleet, replay(trace, fleet))
    assert figures.waits == Waits(3, pytest.approx(40 / 3), 20.0, 20.0, 20.0, 20.0)
    assert (figures.started_at_once, figures.use) == (pytest.approx(1 / 3), 1.0)
    assert figures.slowdowns == {"a": pytest.approx((1 + 5 / 3) / 2), "b": pytest.approx(5 / 3)}
    assert figures.fairness == pytest.approx(jain([4 / 3, 5 / 3]))


def test_a_job_larger_than_every_host_takes_whole_hosts():
    assert shape_of(3, 8) == Shape(1, 3, (0,))
    assert shape_of(20, 8) == Shape(3, 8, (0,))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seconds,devices\n1,1\n", "no column submitted_seconds, team"),
        ("submitted_seconds,seconds,devices,team\n0,x,1,a\n", "line 2"),
        ("submitted_seconds,seconds,devices,team\n0,5,1.5,a\n", "whole number"),
        ("submitted_seconds,seconds,devices,team\n", "no job"),
    ],
    ids=["column", "number", "part", "empty"],
)
def test_a_file_that_is_no_trace_is_refused_by_line_and_column(tmp_path, text, said):
    path = tmp_path / "jobs.csv"
    path.write_text(text)
    with pytest.raises(CommandError, match=said):
        call_command("replay", trace=path)


def test_a_file_is_replayed_in_the_order_of_its_times(tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text("submitted_seconds,seconds,devices,team\n150,60,8,b\n100,60,16,a\n")
    trace = read(path, 8)
    assert (trace.submitted, trace.team_names, trace.teams) == ([0.0, 50.0], ["a", "b"], [0, 1])
    assert replay(trace, even_fleet(2, 8)).starts == [0.0, 60.0]


@pytest.mark.parametrize(
    "given",
    [
        *({"jobs": 0}, {"hosts": [0]}, {"load": 0.0}, {"interval": -1.0}),
        *({"pool": "a", "hosts": [3]}, {"pool": "a", "jobs": 5}, {"pool": "a", "devices": 8}),
        *({"pool": "a", "load": 1.1}, {"pool": "a", "seed": 0}, {"trace": Path("a"), "seed": 1}),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(given):
    with pytest.raises(CommandError, match=f"^--{list(given)[-1]} "):
        call_command("replay", **given)


@pytest.mark.django_db(databases="__all__")
def test_a_pools_own_history_is_replayed_beside_the_waits_that_it_had(team, alice):
    host, at = gpu_host(team, "node-a", 2), now()
    for number in range(3):
        job = make_job(team, alice, None, pool=host.pool, devices_per_host=2)
        began = at + timedelta(seconds=100 + 60 * number)
        Job.objects.filter(pk=job.pk).update(
            queued_at=at + timedelta(seconds=number), started_at=began,
            ended_at=began + timedelta(seconds=60), max_duration_seconds=70,
        )  # fmt: skip
    out = StringIO()
    call_command("replay", pool=host.pool.name, interval=0.0, json=True, stdout=out)
    told = json.loads(out.getvalue())
    assert told["real_waits"]["mean"] == pytest.approx(159)
    (row,) = told["replays"]
    assert (row["hosts"], row["waits"]["mean"], row["waits"]["most"]) == (1, 59.0, 118.0)
    other = Pool.objects.create(team=team, name=host.pool.name, slug="another")
    with pytest.raises(CommandError, match=rf"2 pools are named .* ID instead \(.*{other.pk}"):
        call_command("replay", pool=host.pool.name)
    with pytest.raises(CommandError, match="No pool has the name or the ID nowhere"):
        call_command("replay", pool="nowhere")
    out = StringIO()
    call_command("replay", pool=host.pool.pk, interval=0.0, json=True, stdout=out)
    assert json.loads(out.getvalue())["replays"][0]["waits"] == row["waits"]


def test_first_come_is_the_order_of_submission_whatever_the_priorities():
    trace, num = shaped("philly", 4, 8), 4
    told = {"submitted": [0.0, 1.0, 2.0, 3.0], "seconds": [30.0] * num, "teams": [0, 0, 1, 1]}
    shapes = {"shapes": [Shape(1, 1, (0,))] * num, "lengths": [30.0] * num}
    names = {"team_names": ["a", "b"], "weights": [1.0, 1.0], "priorities": [0, -1, 0, 1]}
    trace = type(trace)(**told, **shapes, **names)
    starts = {
        policy: replay(trace, even_fleet(1, 1), policy).starts
        for policy in ("first-come", "fair-share")
    }
    assert starts["first-come"] == [0.0, 30.0, 60.0, 90.0]
    assert starts["fair-share"] == [0.0, 90.0, 60.0, 30.0]
