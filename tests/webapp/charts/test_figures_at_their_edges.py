"""Figures and pictures of series that are short, flat, gapped, huge or empty."""

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from webapp.charts.catalog import BY_KIND, charts_for
from webapp.charts.figures import (
    HEIGHT,
    ORIGIN_MS,
    WIDTH,
    Prediction,
    Series,
    clock,
    drawing,
    figure,
)

LOSS, TOKENS, MEMORY, PROCESSOR = BY_KIND["train"]
ALL = sorted({chart.key: chart for kind in BY_KIND.values() for chart in kind}.items())
VALUES = st.lists(st.none() | st.floats(0, 1e12), max_size=40)


def series(values, metric="tokens_per_second", step_ms=1000) -> Series:
    return Series(metric, tuple(step_ms * at for at in range(len(values))), tuple(values))


def draw(chart, values, prediction=None, end_ms=0):
    found = series(values, chart.metric)
    return figure(chart, found, start_ms=0, end_ms=end_ms, prediction=prediction)


@pytest.mark.parametrize(("key", "chart"), ALL)
@pytest.mark.parametrize(
    "values", [(), (0.0,), (None,), (None, None), (5.0, None), (None, 5.0), (0.0, 0.0)]
)
def test_every_chart_of_a_poor_series_is_json_with_a_picture(key, chart, values):
    drawn = draw(chart, values)

    assert json.dumps(drawn, allow_nan=False)
    assert drawing(drawn)["levels"]


@given(VALUES)
def test_a_picture_never_leaves_its_frame(values):
    for path in drawing(draw(TOKENS, values, Prediction(50.0, 30.0, 90.0)))["paths"]:
        found = [float(text) for text in re.findall(r"-?\d+\.\d", path["d"])]
        assert all(-0.1 <= x <= WIDTH for x in found[::2])
        assert all(-0.1 <= y <= HEIGHT for y in found[1::2])


@given(VALUES)
def test_the_axis_holds_every_value(values):
    drawn = draw(TOKENS, values)
    known = [value for value in values if value is not None]

    low, high = drawn["layout"]["yaxis"]["range"]

    assert low <= min(known, default=0)
    assert high >= max(known, default=0)


@given(VALUES)
def test_each_gap_lifts_the_pen_once(values):
    (path, *_) = drawing(draw(LOSS, values))["paths"] or [{"d": ""}]
    runs = re.findall("v+", "".join("-" if value is None else "v" for value in values))

    assert path["d"].count("M") == len(runs)


@pytest.mark.parametrize(("start", "end"), [(0, 0), (0, 500), (5000, 0)])
def test_a_time_axis_is_never_shorter_than_a_second(start, end):
    drawn = figure(TOKENS, series(()), start_ms=start, end_ms=end)
    first, last = drawn["layout"]["xaxis"]["range"]

    assert first == ORIGIN_MS
    assert last - first >= 1000


def test_an_hour_of_points_keeps_its_instants():
    drawn = figure(LOSS, series([1.0] * 3600), start_ms=0, end_ms=3_600_000)

    assert drawn["data"][-1]["x"][-1] == ORIGIN_MS + 3_599_000


def test_a_chart_of_zeros_has_an_axis_with_a_height():
    low, high = draw(PROCESSOR, (0.0, 0.0))["layout"]["yaxis"]["range"]

    assert (low, high) == (0, 1.0)


def test_the_levels_of_a_picture_go_from_bottom_to_top():
    levels = drawing(draw(TOKENS, (0.0, 100.0)))["levels"]

    assert [float(level["y"]) for level in levels] == sorted(
        (float(level["y"]) for level in levels), reverse=True
    )


def test_the_times_of_a_picture_begin_at_zero():
    times = drawing(draw(TOKENS, (1.0,) * 61, end_ms=60_000))["times"]

    assert [each["text"] for each in times] == ["0:00", "0:30", "1:00"]


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (999, "0:00"),
        (59_999, "0:59"),
        (3_599_999, "59:59"),
        (86_400_000, "24:00 h"),
        (360_000_000, "100:00 h"),
    ],
)
def test_a_clock_counts_whole_seconds(ms, text):
    assert clock(ms) == text


@pytest.mark.parametrize(
    ("metric", "unit", "axis", "title"),
    [
        ("load_seconds", "seconds", "s", "Load"),
        ("swap_bytes", "bytes", "GiB", "Swap"),
        ("npu_utilization", "ratio", "%", "Npu"),
        ("learning_rate", "", "", "Learning rate"),
        ("_bytes", "bytes", "GiB", ""),
        ("", "", "", ""),
    ],
)
def test_a_metric_that_nobody_listed_has_a_chart(metric, unit, axis, title):
    chart = charts_for("train", [metric], is_complete=True)[-1]

    assert (chart.unit, chart.axis, chart.title) == (unit, axis, title)


@pytest.mark.parametrize("metric", ["gpu_memory_bytes", "gpux_utilization", "xgpu0_memory_bytes"])
def test_only_numbered_gpus_get_gpu_charts(metric):
    assert metric not in [chart.metric for chart in charts_for("train", [metric])]


def test_the_charts_of_many_gpus_are_all_there():
    metrics = [f"gpu{at}_{what}" for at in range(16) for what in ("memory_bytes", "utilization")]

    drawn = [chart.metric for chart in charts_for("train", metrics)]

    assert set(metrics) <= set(drawn)
    assert len(drawn) == len(set(drawn))


@pytest.mark.parametrize("kind", [*BY_KIND, "unknown", ""])
def test_every_key_of_a_jobs_charts_is_its_own(kind):
    keys = [chart.key for chart in charts_for(kind, ["loss", "a", "b_bytes"], is_complete=True)]

    assert len(keys) == len(set(keys))


def test_the_scale_of_memory_is_binary():
    assert draw(MEMORY, (float(2**30),))["data"][-1]["y"] == [1.0]


def test_nothing_of_a_series_is_lost_in_its_figure():
    values = (1.0, None, math.pi, 4e9)

    assert draw(LOSS, values)["data"][-1]["y"] == list(values)
