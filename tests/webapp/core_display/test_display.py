"""What the components are made of: figures on an axis, memory as segments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from webapp.core.display import TERMS, Figure, legend, memory_row

GIB = 1024.0**3


def figure(**changes) -> Figure:
    fields = {"label": "Speed", "value": 100.0, "unit": "tokens_per_second"}
    return Figure(**{**fields, "low": 80.0, "high": 130.0, **changes})


def test_the_prediction_stands_in_the_middle_of_its_axis():
    assert figure().mid == 50


def test_a_wider_interval_draws_a_wider_band():
    assert figure(low=60.0, high=160.0).band.width > figure().band.width


@given(st.floats(1e-6, 1e9), st.floats(0.05, 0.99), st.floats(1.01, 20.0), st.floats(0.02, 50.0))
def test_everything_stays_on_the_axis(value, low, high, measured):
    shown = figure(value=value, low=value * low, high=value * high, measured=value * measured)

    places = [shown.band.start, shown.band.end, shown.mid, shown.dot]

    assert all(-0.1 <= place <= 100.1 for place in places)


def test_a_measured_value_is_the_one_that_is_shown():
    assert figure(measured=90.0).shown.value == "90.0"


def test_an_interval_in_the_unit_above_it_leaves_the_unit_out():
    assert figure().interval_words == "80.0\u2013130"


def test_an_interval_over_two_units_says_both():
    shown = figure(value=0.9, unit="seconds", low=0.5, high=1.4)

    assert shown.interval_words == "500\u00a0ms\u20131.4\u00a0s"


def test_a_figure_without_an_interval_draws_no_whisker():
    assert not figure(low=None, high=None).has_whisker


def row(capacity: float = 24 * GIB, **parts: float):
    return memory_row("GPU 0", {name: size * GIB for name, size in parts.items()}, capacity)


def test_the_terms_keep_their_order():
    shown = row(runtime_overhead=1, kv_cache=4, weights=10)

    assert [segment.term for segment in shown.segments] == ["weights", "kv-cache", "overhead"]


def test_the_bar_is_as_wide_as_the_capacity_while_everything_fits():
    shown = row(weights=12)

    assert shown.segments[0].span.width == 50
    assert not shown.is_over


def test_too_much_draws_the_capacity_inside_the_bar():
    shown = row(weights=48)

    assert shown.is_over
    assert shown.capacity == 50


def test_a_measured_peak_is_a_needle():
    shown = memory_row("GPU 0", {"weights": 10 * GIB}, 20 * GIB, measured_bytes=5 * GIB)

    assert shown.needle == 25


def test_adapters_are_drawn_as_weights():
    assert [segment.term for segment in row(weights=1, adapters=1).segments] == ["weights"]


def test_every_tensor_class_of_the_planner_is_drawn():
    classes = {"weights", "kv_cache", "activations", "gradients", "optimizer_states"}
    classes |= {"adapters", "buffers", "runtime_overhead"}

    assert {part for _, _, parts in TERMS for part in parts} == classes


def test_the_legend_names_each_term_once():
    rows = [row(weights=1), row(weights=1, kv_cache=1)]

    assert [segment.name for segment in legend(rows)] == ["Weights", "KV cache"]


def test_words_leave_out_a_unit_that_is_said_again():
    assert row(weights=12).words == "12.0 / 24.0\u00a0GiB"


@pytest.mark.parametrize("size", [0.5, 5.0, 23.9])
def test_the_segments_never_reach_past_the_bar(size):
    shown = row(weights=size, kv_cache=size, activations=size)

    assert shown.segments[-1].span.end <= 100.05
