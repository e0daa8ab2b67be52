"""Published times of compression: what the physics says of them, and what the fit adds."""

import json
import math

import pytest

from planner.catalog.engines import factor_of, published_times, spread_of
from planner.catalog.reading import data_json
from planner.cost.compression import RECIPES, column_seconds, tuning_seconds
from planner.fitting.compression_fitting import (
    AT_MOST,
    build_compression,
    cases,
    compared,
    compression_section,
    kinds,
    left_out,
    log_factor,
    weighted_median,
)
from planner.fitting.evidence import number, table
from tests.planner.test_accuracy import PAGE

ROWS = table("compression")


def of(source):
    return [case for case in cases() if case.source == source]


def test_the_shipped_factors_are_what_the_rows_give_today():
    shipped = data_json("compression_factors.json")

    assert shipped == json.loads(json.dumps(build_compression()))


def test_every_row_names_its_source_and_no_row_twice():
    assert len({row["row_id"] for row in ROWS}) == len(ROWS)
    assert all(row["source"] and row["source_path"] and row["notes"] for row in ROWS)


@pytest.mark.parametrize("case", of("gptq-paper"), ids=lambda case: case.row["model"])
def test_gptqs_own_table_comes_out_of_the_physics_alone(case):
    """arXiv:2210.17323, table 2: 10 minutes to 4.2 hours on one A100."""
    assert abs(case.log_ratio) < math.log(1.25)


@pytest.mark.parametrize("case", of("llm-compressor-ddp"), ids=lambda case: case.row["row_id"])
def test_another_sources_gptq_comes_out_without_having_been_seen(case):
    found = left_out(kinds()["second_order"])
    errors = {other.row["row_id"]: error for other, error in found}

    assert abs(errors[case.row["row_id"]]) < math.log(1.5)


@pytest.mark.parametrize("case", of("auto-round-cost"), ids=lambda case: case.row["row_id"])
def test_tuning_comes_out_within_a_half(case):
    assert abs(case.log_ratio) < math.log(1.85)


def test_peaks_of_device_memory_come_out_within_a_quarter():
    told = [case for case in cases() if case.row["peak_memory_bytes"]]
    errors = [
        case.estimate.memory.per_device_peak_bytes / number(case.row, "peak_memory_bytes") - 1
        for case in told
    ]

    assert len(errors) == 16
    assert max(map(abs, errors)) < 0.25


def test_four_fifths_of_left_out_rows_lie_inside_the_interval():
    found = left_out(kinds()["second_order"])
    inside = [abs(error) <= 1.2816 * spread_of("second_order") for _, error in found]

    assert 0.75 <= sum(inside) / len(inside) <= 0.9


def test_bounds_take_no_part_in_the_fit_and_stand_on_the_page():
    bounds = [row for row in ROWS if row["relation"] == AT_MOST]

    assert bounds
    assert not {row["row_id"] for row in bounds} & {case.row["row_id"] for case in cases()}
    assert compression_section() in PAGE.read_text(encoding="utf-8")
    assert "published as under 4.5 h" in compression_section()


def test_rows_of_other_recipes_are_told_apart_with_the_reason():
    others = [row for row in ROWS if not compared(row)]

    assert len(others) == 8
    assert all("not compared: " in row["notes"] for row in others)


def test_a_vague_source_counts_a_quarter():
    exact, vague = of("gptq-paper")[0], of("taiwan-llama-gptq")[0]

    assert (exact.weight, vague.weight) == (1.0, 0.25)
    assert abs(log_factor([exact, vague]) - 0.8 * exact.log_ratio) < abs(vague.log_ratio) / 2


def test_nothing_to_fit_is_the_physics():
    assert log_factor([]) == 0.0
    assert factor_of("qmoe") == 1.0
    assert published_times("qmoe") == 0


@pytest.mark.parametrize(
    ("told", "middle"),
    [
        ([(3.0, 1.0)], 3.0),
        ([(1.0, 1.0), (2.0, 1.0)], 1.5),
        ([(1.0, 0.25), (5.0, 1.0), (9.0, 0.25)], 5.0),
    ],
)
def test_a_weighted_median_has_half_the_weight_on_either_side(told, middle):
    assert weighted_median(told) == middle


def test_every_kind_of_method_with_times_is_one_that_a_recipe_names():
    assert set(data_json("compression_factors.json")["methods"]) <= {
        recipe.alike for recipe in RECIPES.values()
    }


def test_columns_and_steps_wait_for_each_other():
    assert column_seconds(columns=1000, passes=2, column_s=1e-3) == pytest.approx(2.0)
    assert tuning_seconds(num_layers=10, steps=200, step_s=1e-3) == pytest.approx(2.0)
