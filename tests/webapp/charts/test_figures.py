"""The figures that charts are drawn from."""

import json

from webapp.charts.catalog import charts_for
from webapp.charts.figures import ORIGIN_MS, Prediction, Series, figure, template

TOKENS = charts_for("train")[1]
LOSS = charts_for("train")[0]
MEMORY = charts_for("train")[2]
GIB = 2**30
SAID = Prediction(3000.0, 2700.0, 3400.0)


def points(*values, metric="tokens_per_second") -> Series:
    return Series(metric, tuple(1000 * (i + 1) for i in range(len(values))), values)


def draw(series, prediction=None, chart=TOKENS, end_ms=61_000):
    return figure(chart, series, start_ms=1000, end_ms=end_ms, prediction=prediction)


def trace(drawn, name):
    return next(trace for trace in drawn["data"] if trace["name"] == name)


def test_time_counts_from_the_start_of_the_attempt():
    assert trace(draw(points(1.0, 2.0)), "measured")["x"] == [ORIGIN_MS, ORIGIN_MS + 1000]


def test_values_are_scaled_to_the_axis_unit():
    drawn = draw(points(3.0 * GIB, metric="rss_bytes"), chart=MEMORY)
    assert trace(drawn, "measured")["y"] == [3.0]


def test_a_prediction_is_dashed_and_spans_the_time_axis():
    line = trace(draw(points(1.0), SAID), "predicted")
    assert (line["x"], line["y"]) == ([ORIGIN_MS, ORIGIN_MS + 60_000], [3000.0, 3000.0])
    assert "dash" in line["line"]


def test_the_interval_is_a_band_between_its_ends():
    band = trace(draw(points(1.0), SAID), "80 % interval")
    assert (min(band["y"]), max(band["y"]), band["fill"]) == (2700.0, 3400.0, "toself")


def test_a_prediction_without_interval_has_no_band():
    names = [each["name"] for each in draw(points(1.0), Prediction(5.0))["data"]]
    assert names == ["predicted", "measured"]


def test_measured_is_solid_and_drawn_last():
    last = draw(points(1.0), SAID)["data"][-1]
    assert last["name"] == "measured"
    assert "dash" not in last["line"]


def test_the_axis_starts_at_zero_and_holds_every_line():
    low, high = draw(points(100.0), SAID)["layout"]["yaxis"]["range"]
    assert low == 0
    assert high > 3400.0


def test_loss_does_not_start_at_zero():
    assert "range" not in draw(points(3.1, 2.0), chart=LOSS)["layout"]["yaxis"]


def test_the_time_axis_reaches_to_the_last_point_when_a_job_runs_over():
    drawn = draw(points(*range(100)), end_ms=2000)
    assert drawn["layout"]["xaxis"]["range"] == [ORIGIN_MS, ORIGIN_MS + 99_000]


def test_a_gap_stays_a_gap_in_the_json():
    drawn = draw(Series("tokens_per_second", (1000, 2000, 3000), (5.0, None, 6.0)), SAID)
    assert trace(json.loads(json.dumps(drawn, allow_nan=False)), "measured")["y"][1] is None


def test_every_colour_is_a_design_token():
    text = json.dumps(draw(points(1.0), SAID))
    assert "#" not in text
    assert text.count("var(--") >= 8
    assert text.count("rgba(") == text.count("rgba(0,0,0,0)")


def test_the_template_hides_what_a_calm_page_does_not_need():
    assert template()["showlegend"] is False
    assert template()["hovermode"] == "x unified"


def test_each_figure_gets_a_template_of_its_own():
    first = template()
    first["xaxis"]["range"] = [0, 1]
    assert "range" not in template()["xaxis"]
