"""The figures that charts are drawn from, their pictures, and memory over time."""

import itertools
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.specs.units import GIB
from webapp.charts.plots import (
    BY_KIND,
    HEIGHT,
    ORIGIN_MS,
    WIDTH,
    Prediction,
    Series,
    charts_for,
    clock,
    drawing,
    figure,
    levels_between,
    template,
)
from webapp.charts.timelines import Backdrop, Layer, memory_timeline

# The figures that charts are drawn from


LOSS, TOKENS, MEMORY, PROCESSOR = BY_KIND["train"]
SAID = Prediction(3000.0, 2700.0, 3400.0)


def points(*values, metric="tokens_per_second") -> Series:
    return Series(metric, tuple(1000 * (i + 1) for i in range(len(values))), values)


def draw(series, prediction=None, chart=TOKENS, end_ms=61_000):
    return figure(chart, series, start_ms=1000, end_ms=end_ms, prediction=prediction)


def trace(drawn, name):
    return next(trace for trace in drawn["data"] if trace["name"] == name)


def test_time_counts_from_the_start_and_values_are_in_the_unit_of_the_axis():
    assert trace(draw(points(1.0, 2.0)), "measured")["x"] == [ORIGIN_MS, ORIGIN_MS + 1000]
    drawn = draw(points(3.0 * GIB, metric="rss_bytes"), chart=MEMORY)
    assert trace(drawn, "measured")["y"] == [3.0]


def test_a_prediction_is_dashed_through_its_band_before_the_solid_measurement():
    line = trace(draw(points(1.0), SAID), "predicted")
    assert (line["x"], line["y"]) == ([ORIGIN_MS, ORIGIN_MS + 60_000], [3000.0, 3000.0])
    assert "dash" in line["line"]

    band = trace(draw(points(1.0), SAID), "80 % interval")
    assert (min(band["y"]), max(band["y"]), band["fill"]) == (2700.0, 3400.0, "toself")

    names = [each["name"] for each in draw(points(1.0), Prediction(5.0))["data"]]
    assert names == ["predicted", "measured"]

    last = draw(points(1.0), SAID)["data"][-1]
    assert last["name"] == "measured"
    assert "dash" not in last["line"]


def test_an_axis_holds_every_line_and_starts_at_zero_but_for_a_loss():
    low, high = draw(points(100.0), SAID)["layout"]["yaxis"]["range"]
    assert low == 0
    assert high > 3400.0
    assert "range" not in draw(points(3.1, 2.0), chart=LOSS)["layout"]["yaxis"]

    drawn = draw(points(*range(100)), end_ms=2000)
    assert drawn["layout"]["xaxis"]["range"] == [ORIGIN_MS, ORIGIN_MS + 99_000]


def test_every_colour_is_a_design_token_in_a_calm_template_of_each_figures_own():
    text = json.dumps(draw(points(1.0), SAID))
    assert "#" not in text
    assert text.count("var(--") >= 8
    assert text.count("rgba(") == text.count("rgba(0,0,0,0)")

    assert template()["showlegend"] is False
    assert template()["hovermode"] == "x unified"
    first = template()
    first["xaxis"]["range"] = [0, 1]
    assert "range" not in template()["xaxis"]


# Figures and pictures of series that are short, flat, gapped, huge or empty


ALL = sorted({chart.key: chart for kind in BY_KIND.values() for chart in kind}.items())
VALUES = st.lists(st.none() | st.floats(0, 1e12), max_size=40)


def series(values, metric="tokens_per_second", step_ms=1000) -> Series:
    return Series(metric, tuple(step_ms * at for at in range(len(values))), tuple(values))


def drawn_of(chart, values, prediction=None, end_ms=0):
    found = series(values, chart.metric)
    return figure(chart, found, start_ms=0, end_ms=end_ms, prediction=prediction)


def test_every_chart_of_a_poor_series_is_json_with_a_picture():
    poor = [(), (0.0,), (None,), (None, None), (5.0, None), (None, 5.0), (0.0, 0.0)]
    wrong = []
    for (key, chart), values in itertools.product(ALL, poor):
        drawn = drawn_of(chart, values)
        if not json.dumps(drawn, allow_nan=False) or not drawing(drawn)["levels"]:
            wrong.append((key, values, drawn))
    assert not wrong, wrong


@given(VALUES)
def test_a_picture_never_leaves_its_frame(values):
    for path in drawing(drawn_of(TOKENS, values, Prediction(50.0, 30.0, 90.0)))["paths"]:
        found = [float(text) for text in re.findall(r"-?\d+\.\d", path["d"])]
        assert all(-0.1 <= x <= WIDTH for x in found[::2])
        assert all(-0.1 <= y <= HEIGHT for y in found[1::2])


@given(VALUES)
def test_the_axis_holds_every_value(values):
    drawn = drawn_of(TOKENS, values)
    known = [value for value in values if value is not None]
    low, high = drawn["layout"]["yaxis"]["range"]
    assert low <= min(known, default=0)
    assert high >= max(known, default=0)


@given(VALUES)
def test_each_gap_lifts_the_pen_once(values):
    (path, *_) = drawing(drawn_of(LOSS, values))["paths"] or [{"d": ""}]
    runs = re.findall("v+", "".join("-" if value is None else "v" for value in values))
    assert path["d"].count("M") == len(runs)


def test_a_time_axis_is_never_shorter_than_a_second_nor_any_axis_without_height():
    for start, end in [(0, 0), (0, 500), (5000, 0)]:
        drawn = figure(TOKENS, series(()), start_ms=start, end_ms=end)
        first, last = drawn["layout"]["xaxis"]["range"]
        assert first == ORIGIN_MS, (start, end)
        assert last - first >= 1000, (start, end)

    drawn = figure(LOSS, series([1.0] * 3600), start_ms=0, end_ms=3_600_000)
    assert drawn["data"][-1]["x"][-1] == ORIGIN_MS + 3_599_000

    low, high = drawn_of(PROCESSOR, (0.0, 0.0))["layout"]["yaxis"]["range"]
    assert (low, high) == (0, 1.0)


def test_the_axes_of_a_picture_rise_from_zero():
    levels = drawing(drawn_of(TOKENS, (0.0, 100.0)))["levels"]
    assert [float(level["y"]) for level in levels] == sorted(
        (float(level["y"]) for level in levels), reverse=True
    )

    times = drawing(drawn_of(TOKENS, (1.0,) * 61, end_ms=60_000))["times"]
    assert [each["text"] for each in times] == ["0:00", "0:30", "1:00"]


def test_a_clock_counts_whole_seconds():
    for ms, text in [
        (0, "0:00"),
        (999, "0:00"),
        (59_999, "0:59"),
        (65_000, "1:05"),
        (3_599_999, "59:59"),
        (3_600_000, "1:00 h"),
        (7_384_000, "2:03 h"),
        (86_400_000, "24:00 h"),
        (360_000_000, "100:00 h"),
    ]:
        assert clock(ms) == text, ms


def test_a_metric_that_nobody_listed_has_a_chart():
    for metric, unit, axis, title in [
        ("load_seconds", "seconds", "s", "Load"),
        ("swap_bytes", "bytes", "GiB", "Swap"),
        ("npu_utilization", "ratio", "%", "Npu"),
        ("learning_rate", "", "", "Learning rate"),
        ("_bytes", "bytes", "GiB", ""),
        ("", "", "", ""),
    ]:
        chart = charts_for("train", [metric], is_complete=True)[-1]
        assert (chart.unit, chart.axis, chart.title) == (unit, axis, title), metric


def test_numbered_gpus_alone_have_gpu_charts_all_of_them():
    for metric in ["gpu_memory_bytes", "gpux_utilization", "xgpu0_memory_bytes"]:
        assert metric not in [chart.metric for chart in charts_for("train", [metric])], metric

    metrics = [f"gpu{at}_{what}" for at in range(16) for what in ("memory_bytes", "utilization")]
    drawn = [chart.metric for chart in charts_for("train", metrics)]
    assert set(metrics) <= set(drawn)
    assert len(drawn) == len(set(drawn))


def test_every_key_of_a_jobs_charts_is_its_own():
    for kind in [*BY_KIND, "unknown", ""]:
        keys = [
            chart.key for chart in charts_for(kind, ["loss", "a", "b_bytes"], is_complete=True)
        ]
        assert len(keys) == len(set(keys)), kind


def test_nothing_of_a_series_is_lost_in_its_figure_and_memory_counts_in_gib():
    values = (1.0, None, math.pi, 4e9)
    assert drawn_of(LOSS, values)["data"][-1]["y"] == list(values)
    assert drawn_of(MEMORY, (float(2**30),))["data"][-1]["y"] == [1.0]

    drawn = draw(Series("tokens_per_second", (1000, 2000, 3000), (5.0, None, 6.0)), SAID)
    assert trace(json.loads(json.dumps(drawn, allow_nan=False)), "measured")["y"][1] is None


# Memory over time before its prediction, as a figure and as its picture


LAYERS = [Layer("weights", "Weights", 2 * GIB), Layer("activations", "Activations", 3 * GIB)]
SERIES = Series("rss_bytes", (1000, 2000, 3000), (GIB, None, 6 * GIB))


@pytest.fixture
def timeline():
    return memory_timeline(SERIES, Backdrop(LAYERS, 8 * GIB, requested_bytes=9 * GIB), 1000, 4000)


def test_the_predicted_terms_stand_on_each_other_below_the_capacity(timeline):
    assert trace(timeline, "Weights")["y"] == [0, 0, 2, 2]
    assert trace(timeline, "Activations")["y"] == [2, 2, 5, 5]

    capacity = trace(timeline, "capacity")
    assert (capacity["x"], capacity["y"]) == ([ORIGIN_MS, ORIGIN_MS + 3000], [8, 8])
    assert trace(timeline, "measured")["y"] == [1, None, 6]
    assert timeline["layout"]["yaxis"]["range"] == [0, pytest.approx(9 * 1.08)]


def test_what_was_asked_for_rises_from_the_last_point_if_it_was_refused(timeline):
    wanted = trace(timeline, "refused allocation")
    assert (wanted["x"], wanted["y"]) == ([ORIGIN_MS + 2000] * 2, [6, 9])
    plain = memory_timeline(SERIES, Backdrop(LAYERS, 8 * GIB), 1000, 4000)
    assert "refused allocation" not in {each["name"] for each in plain["data"]}


def test_the_picture_draws_every_trace_with_its_own_class(timeline):
    classes = [path["class"] for path in drawing(timeline)["paths"]]
    assert classes == [
        "layer term-weights", "layer term-activations", "capacity", "wanted", "meas",
    ]  # fmt: skip


# The picture of a chart without JavaScript


def picture(values, prediction=None, chart=TOKENS):
    series = Series(chart.metric, tuple(1000 * i for i in range(len(values))), values)
    drawn = figure(chart, series, start_ms=0, end_ms=1000 * len(values), prediction=prediction)
    return drawing(drawn)


def numbers(path):
    return [float(text) for text in re.findall(r"-?\d+\.\d", path["d"])]


def test_every_point_lies_inside_the_picture_with_its_own_class():
    for path in picture((5.0, 80.0, 20.0), Prediction(50.0, 30.0, 90.0))["paths"]:
        found = numbers(path)
        assert all(0 <= x <= WIDTH for x in found[::2])
        assert all(0 <= y <= HEIGHT for y in found[1::2])

    classes = [path["class"] for path in picture((1.0,), Prediction(2.0, 1.0, 3.0))["paths"]]
    assert classes == ["band", "pred", "meas"]

    (path,) = picture((1.0, None, 2.0))["paths"]
    assert path["d"].count("M") == 2
    (path,) = picture((None, 3.0, None))["paths"]
    assert path["d"].endswith(" h0")
    assert picture(())["paths"] == []
    assert len({level["y"] for level in picture((2.0, 2.0), chart=LOSS)["levels"]}) >= 3


def test_the_levels_of_an_axis_are_round_and_negative_only_where_values_are():
    for values, texts in [
        ((1.0, 683.0), ["0", "200", "400", "600"]),
        ((0.0, 6e-4), ["0", "0.0002", "0.0004", "0.0006"]),
        ((-1.0, 1.0), ["\N{MINUS SIGN}1", "\N{MINUS SIGN}0.5", "0", "0.5", "1"]),
    ]:
        levels = drawing(drawn_of(LOSS, values))["levels"]
        assert [each["text"] for each in levels] == texts, values


def test_an_extreme_range_has_its_ends_as_levels():
    for low, high in [(-1.7e308, 1.7e308), (0.0, 5e-324), (1e20, 1e20), (1e16, 1e16 + 2)]:
        assert levels_between(low, high) == [low, high], (low, high)
