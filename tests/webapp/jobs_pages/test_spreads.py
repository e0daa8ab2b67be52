"""The spread of one metric over the GPUs and hosts of a job."""

import json
import re

import pytest

from tests.webapp.conftest import client_of
from tests.webapp.jobs.gangs import make_gang, make_hosts, start, tell
from webapp.charts.plots import Series
from webapp.jobs.job_charts import draw
from webapp.jobs.spreads import draw_spreads, rows_among, spreads_of

pytestmark = pytest.mark.django_db(databases="__all__")


def test_rows_are_mean_lowest_and_highest_of_the_sources_that_report():
    def series(*values, first=0, step=1):
        return Series("m", tuple(1000 * (first + step * n) for n in range(len(values))), values)

    for named, sources, rows in [
        ("none", [], []),
        ("no point", [Series("m")], []),
        ("alike", [series(1.0), series(3.0)], [(0, 2.0, 1.0, 3.0)]),
        ("a gap", [series(1.0, None), series(3.0)], [(0, 2.0, 1.0, 3.0)]),
        (
            "held while a slow one says nothing, until it says more",
            [series(1.0, 1.0, 1.0, 1.0, 1.0), series(3.0, 5.0, step=3)],
            [(0, 2.0, 1.0, 3.0), (1000, 2.0, 1.0, 3.0), (2000, 2.0, 1.0, 3.0), (3000, 3.0, 1.0, 5.0)],
        ),
        (
            "one that ended long before counts while it reported",
            [series(1.0, 1.0, step=60), series(3.0)],
            [(0, 2.0, 1.0, 3.0), (60_000, 1.0, 1.0, 1.0)],
        ),
    ]:  # fmt: skip
        assert rows_among(sources, 1000) == rows, named


def gpus(*busy: float) -> tuple[str, dict]:
    values = {f"gpu{n}_utilization": share for n, share in enumerate(busy)}
    return "metric", {"source": "gpu", "values": values}


def test_the_gpus_of_every_host_have_one_chart_with_a_band_and_its_words(team, alice):
    job = make_gang(team, alice, make_hosts(team, 2))
    first, second = start(job)
    tell(first, gpus(0.5, 0.7), ("metric", {"source": "job", "values": {"loss": 2.0}, "step": 1}))
    tell(second, gpus(0.9, 0.1))
    job.refresh_from_db()
    assert [each.chart.key for each in spreads_of(job)] == ["spread-gpu_utilization"]
    (drawn,) = draw_spreads(job, draw(job, is_complete=True))
    assert drawn.chart.title == "GPU utilisation, mean of 4 GPUs on 2 hosts"
    band, mean = drawn.figure["data"]
    assert mean["y"] == pytest.approx([55.0])
    assert band["y"] == pytest.approx([10.0, 90.0])
    assert "from 10\N{NO-BREAK SPACE}% to 90\N{NO-BREAK SPACE}%" in drawn.words
    assert drawn.words.endswith("among GPU 0 of Box 1 to GPU 1 of Box 2.")

    client, address = client_of(alice), f"/jobs/{job.pk}/metrics/"
    assert drawn.chart.title in client.get(address).content.decode()
    fresh = client.get(address, {"since": 0}, headers={"HX-Request": "true"})
    found = re.search(r'id="fresh-points"[^>]*>(.*?)</script>', fresh.content.decode())
    rows = json.loads(found[1])["spread/gpu_utilization"]
    assert rows[0][1:] == pytest.approx([0.55, 0.1, 0.9])


def test_one_gpu_or_one_host_has_no_spread(running, report):
    report(gpus(0.5))
    assert spreads_of(running) == []
    report(gpus(0.5, 0.6))
    assert [each.has_hosts for each in spreads_of(running)] == [False]
