"""Which charts a job has, and the chart of a sweep over the plan's curve."""

import json

import pytest

from webapp.charts.plots import SECTIONS, charts_for, section_of
from webapp.charts.timelines import CHARTS, At, sweep_chart

# Which charts a job has


def keys(kind, metrics=(), **more):
    return [chart.key for chart in charts_for(kind, metrics, **more)]


def test_each_kind_of_job_has_its_own_charts_first():
    assert keys("train") == ["loss", "tokens_per_second", "memory", "cpu"]
    assert keys("benchmark")[:2] == ["prefill_tokens_per_second", "decode_tokens_per_second"]

    assert keys("compress")[:4] == [
        "original_prefill_tokens_per_second",
        "original_decode_tokens_per_second",
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
    ]
    assert keys("dance") == ["memory", "cpu"]


def test_what_was_reported_adds_its_chart_to_the_overview_or_to_the_metrics_tab():
    assert "loss" in keys("compress", ["loss"])
    found = keys("train", ["gpu0_memory_bytes", "gpu0_utilization", "gpu1_utilization"])
    assert found[-3:] == ["gpu0_memory_bytes", "gpu0_utilization", "gpu1_utilization"]
    # What is judged follows the loss, also where a chart stands before it.
    found = keys("train", ["prefill_tokens_per_second", "reward", "accuracy"])
    assert found[:4] == ["prefill_tokens_per_second", "loss", "reward", "accuracy"]
    assert "grad_norm" not in keys("train", ["grad_norm"])
    assert "grad_norm" in keys("train", ["grad_norm"], is_complete=True)


def test_no_metric_is_drawn_twice_and_an_unknown_one_takes_its_unit_from_its_name():
    metrics = ["loss", "rss_bytes", "cpu_utilization", "gpu0_memory_bytes", "step_seconds"]
    drawn = [chart.metric for chart in charts_for("train", metrics, is_complete=True)]
    assert len(drawn) == len(set(drawn))

    chart = charts_for("train", ["queue_seconds"], is_complete=True)[-1]
    assert (chart.unit, chart.title) == ("seconds", "Queue")


def test_messages_are_drawn_in_percent_and_the_plan_beside_what_nothing_hides():
    metrics = [
        f"{first}communication{part}_ratio"
        for first in ("", "exposed_")
        for part in ("", "_data", "_all_reduce")
    ]

    drawn = {each.metric: each for each in charts_for("train", metrics, is_complete=True)}
    found = {metric: (drawn[metric].title, drawn[metric].predicted) for metric in metrics}

    assert all((drawn[each].unit, drawn[each].scale) == ("ratio", 100.0) for each in metrics)
    assert found == {
        "communication_ratio": ("Communication in a step", ""),
        "communication_data_ratio": ("Communication in a step: data", ""),
        "communication_all_reduce_ratio": ("Communication in a step: all reduce", ""),
        "exposed_communication_ratio": (
            "Exposed communication",
            "exposed_communication_ratio",
        ),
        "exposed_communication_data_ratio": ("Exposed communication: data", ""),
        "exposed_communication_all_reduce_ratio": (
            "Exposed communication: all reduce",
            "",
        ),
    }


# A sweep's chart: what was measured as points with bars, over the plan's dashed curve


RATE, TTFT, _ = CHARTS
MEASURED = [At(1, 70.0, 65.0, 75.0), At(4, 250.0, 200.0, 300.0)]
SAID = [At(1, 80.0, 60.0, 100.0), At(2, 150.0, 120.0, 200.0), At(4, 280.0, 220.0, 350.0)]


def drawn(measured=MEASURED, predicted=SAID, chart=RATE, main=4.0):
    return sweep_chart(chart, "clients", measured, predicted, main)


def trace(name, **changes):
    return next(each for each in drawn(**changes).figure["data"] if each["name"] == name)


def test_a_sweep_has_its_dashed_curve_below_the_measured_points_with_their_intervals():
    line, band = trace("predicted"), trace("80 % interval")
    assert (line["x"], line["y"]) == ([1, 2, 4], [80.0, 150.0, 280.0])
    assert "dash" in line["line"]
    assert (band["x"], band["y"][0], band["y"][-1]) == ([1, 2, 4, 4, 2, 1], 60.0, 100.0)

    last = drawn().figure["data"][-1]
    assert (last["name"], last["mode"]) == ("measured", "lines+markers")
    assert (last["error_y"]["array"], last["error_y"]["arrayminus"]) == ([5.0, 50.0], [5.0, 50.0])


def test_the_axes_of_a_sweep_begin_at_nought_and_it_goes_into_json_and_a_picture():
    layout = drawn().figure["layout"]
    assert layout["xaxis"]["type"] == "linear"
    assert layout["xaxis"]["range"] == [0, pytest.approx(4.16)]
    assert layout["yaxis"]["range"] == [0, pytest.approx(350 * 1.08)]

    meta = drawn().figure["layout"]["meta"]
    assert "start_ms" not in meta
    assert json.loads(json.dumps(drawn().figure, allow_nan=False))

    picture = drawn().picture
    assert [each["text"] for each in picture["times"]] == ["0", "2.08", "4.16"]
    assert [each["class"] for each in picture["paths"]] == ["band", "pred", "meas", "meas", "meas"]


def test_its_sentence_holds_the_main_point_against_the_plan():
    for predicted, words in [
        (SAID, "With 4 clients: 250 tok/s, 11 % below the predicted 280 tok/s, inside the 80 %"),
        ([], "With 4 clients: 250 tok/s; the plan has no value for it."),
    ]:
        assert (
            drawn(predicted=predicted).words.replace("\N{NO-BREAK SPACE}", " ").startswith(words)
        ), words


def test_a_sweep_without_a_plan_or_of_one_point_is_drawn_too():
    alone = drawn([At(2, 0.5)], [], TTFT, 2.0)
    assert [each["name"] for each in alone.figure["data"]] == ["measured"]
    assert alone.rows[0][0] == "2"
    assert len(alone.picture["paths"]) == 2


def test_a_chart_of_each_subject_stands_in_its_section():
    sections = {
        "loss": "Quality", "learning_rate": "Quality", "source1_loss": "Quality",
        "tokens_per_second": "Speed", "step_seconds": "Speed", "running_requests": "Requests",
        "rss_bytes": "Memory", "gpu0_memory_bytes": "Memory", "communication_data_ratio": "Communication",
        "checkpoint_seconds": "Checkpoints", "cpu_utilization": "System", "gpu0_utilization": "System",
        "rewards/margins": "Answers and rewards", "logps/chosen": "Answers and rewards",
        "log_odds_ratio": "Answers and rewards", "reward": "Answers and rewards", "kl": "Answers and rewards",
        "nobody_knows": "Other",
    }  # fmt: skip
    charts = charts_for("serve", sections, is_complete=True)
    found = {each.metric: section_of(each) for each in charts}
    assert {name: found[name] for name in sections} == sections
    assert set(found.values()) <= set(SECTIONS)
