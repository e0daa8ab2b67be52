"""Which charts a job has."""

from webapp.charts.catalog import charts_for


def keys(kind, metrics=(), **more):
    return [chart.key for chart in charts_for(kind, metrics, **more)]


def test_training_shows_loss_speed_memory_and_processor():
    assert keys("train") == ["loss", "tokens_per_second", "memory", "cpu"]


def test_a_benchmark_shows_prefill_and_decode_speed():
    assert keys("benchmark")[:2] == ["prefill_tokens_per_second", "decode_tokens_per_second"]


def test_a_compression_draws_the_original_and_the_compressed_model_apart():
    assert keys("compress")[:4] == [
        "original_prefill_tokens_per_second",
        "original_decode_tokens_per_second",
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
    ]


def test_an_unknown_kind_still_shows_memory_and_processor():
    assert keys("dance") == ["memory", "cpu"]


def test_a_known_metric_that_was_reported_adds_its_chart():
    assert "loss" in keys("compress", ["loss"])


def test_each_gpu_that_reports_gets_memory_and_busy_charts():
    found = keys("train", ["gpu0_memory_bytes", "gpu0_utilization", "gpu1_utilization"])
    assert found[-3:] == ["gpu0_memory_bytes", "gpu0_utilization", "gpu1_utilization"]


def test_the_metrics_tab_draws_whatever_else_was_reported():
    assert "grad_norm" not in keys("train", ["grad_norm"])
    assert "grad_norm" in keys("train", ["grad_norm"], is_complete=True)


def test_no_metric_is_drawn_twice():
    metrics = ["loss", "rss_bytes", "cpu_utilization", "gpu0_memory_bytes", "step_seconds"]
    drawn = [chart.metric for chart in charts_for("train", metrics, is_complete=True)]
    assert len(drawn) == len(set(drawn))


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


def test_an_unknown_metric_takes_its_unit_from_its_name():
    chart = charts_for("train", ["queue_seconds"], is_complete=True)[-1]
    assert (chart.unit, chart.title) == ("seconds", "Queue")
